"""What the device knows about each running sequence, one row per response slot.

The columns are allocated once and keep their addresses; a step reads and writes the first B rows.
The host fills a row when a sequence enters and looks at the table once per visit, not per token:
in between, `advance` decides on the tensors themselves which rows have come to their end.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl.workers.rollout.native.columns import Columns
from verl.workers.rollout.native.sampler import RowSettings
from verl.workers.rollout.native.sequence import Sample

NO_TOKEN = -1


@dataclass(frozen=True, eq=False)
class RowTable(Columns):
    """Tensors (B,), except `stop_ids`."""

    newest: Tensor
    """The newest token, whose keys and values are not in the cache yet."""

    num_tokens: Tensor
    """Response tokens so far, the newest included."""

    token_limit: Tensor
    is_done: Tensor
    num_shared: Tensor
    """Prompt tokens in the prompt slot."""

    num_own_prompt: Tensor
    """Prompt tokens in the row's own slot, before its response."""

    prompt_slot: Tensor
    """Slots of the cache, which only kernels look up: elsewhere row i has slot i."""

    slot: Tensor
    stop_ids: Tensor
    """(B, most stop tokens), `NO_TOKEN` where a row has fewer."""

    settings: RowSettings

    @classmethod
    def of(cls, samples: Sequence[Sample], max_stop_ids: int, device: torch.device) -> "RowTable":
        """The rows of samples that have just been given their slots."""

        def column(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.long, device=device)

        groups = [sample.group for sample in samples]
        stop_ids = [
            token
            for group in groups
            for token in (group.stop_token_ids + (NO_TOKEN,) * max_stop_ids)[:max_stop_ids]
        ]
        return cls(
            newest=column([0] * len(samples)),
            num_tokens=column([sample.num_tokens for sample in samples]),
            token_limit=column([group.token_limit for group in groups]),
            is_done=torch.zeros(len(samples), dtype=torch.bool, device=device),
            num_shared=column([group.num_shared for group in groups]),
            prompt_slot=column([group.slot for group in groups]),
            slot=column([sample.slot for sample in samples]),
            num_own_prompt=column([len(g.prompt_ids) - g.num_shared for g in groups]),
            stop_ids=column(stop_ids).view(len(samples), max_stop_ids),
            settings=RowSettings.of(
                [group.request.params for group in groups], [s.seed for s in samples], device
            ),
        )

    @classmethod
    def empty(cls, num_rows: int, max_stop_ids: int, device: torch.device) -> "RowTable":
        return cls.of([], max_stop_ids, device).zeros(num_rows)

    @property
    def places(self) -> Tensor:
        """Where in its own slot each row's newest token belongs."""
        return self.num_own_prompt + self.num_tokens - 1

    def advance(self, tokens: Tensor) -> None:
        """Append `tokens` (B,) to the rows that are not done, and see which are done now.

        A row that is done runs on with the others, but it stays where it is.
        """
        self.newest.copy_(tokens)
        self.num_tokens.add_(~self.is_done)
        is_stop = (tokens[:, None] == self.stop_ids).any(1)
        self.is_done.logical_or_(is_stop | (self.num_tokens >= self.token_limit))

"""What the device knows about each running sequence, one row per response slot.

The columns are allocated once and keep their addresses; a step reads and writes the first B rows.
The host fills a row when a sequence enters and looks at the table once per visit, not per token:
in between, `advance` decides on the tensors themselves which rows have come to their end.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
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
    def of(cls, samples: Sequence[Sample], max_stop_ids: int) -> "RowTable":
        """The rows of samples that have just been given their slots, in ordinary memory."""
        groups = list(dict.fromkeys(sample.group for sample in samples))
        number = {group: i for i, group in enumerate(groups)}
        owner = np.array([number[sample.group] for sample in samples], dtype=np.int64)

        def column(values: Sequence[int]) -> Tensor:
            return torch.from_numpy(np.array(values, dtype=np.int64))

        def of_groups(values: Sequence[int]) -> Tensor:
            return torch.from_numpy(np.array(values, dtype=np.int64)[owner])

        stop_ids = np.full((len(groups), max_stop_ids), NO_TOKEN, dtype=np.int64)
        for row, group in zip(stop_ids, groups, strict=True):
            row[: len(group.stop_token_ids)] = group.stop_token_ids
        params = [group.request.params for group in groups]
        settings = RowSettings.of(params, [0] * len(params), torch.device("cpu"))
        return cls(
            newest=torch.zeros(len(samples), dtype=torch.long),
            num_tokens=column([sample.num_tokens for sample in samples]),
            token_limit=of_groups([group.token_limit for group in groups]),
            is_done=torch.zeros(len(samples), dtype=torch.bool),
            num_shared=of_groups([group.num_shared for group in groups]),
            prompt_slot=of_groups([group.slot for group in groups]),
            slot=column([sample.slot for sample in samples]),
            num_own_prompt=of_groups([len(g.prompt_ids) - g.num_shared for g in groups]),
            stop_ids=torch.from_numpy(stop_ids[owner]),
            settings=replace(
                settings[torch.from_numpy(owner)], seed=column([s.seed for s in samples])
            ),
        )

    @classmethod
    def empty(cls, num_rows: int, max_stop_ids: int, device: torch.device) -> "RowTable":
        return cls.of([], max_stop_ids).to(device).zeros(num_rows)

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

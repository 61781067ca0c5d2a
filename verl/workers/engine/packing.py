"""From the padded rows of a batch to packed tokens, and back.

A row is [padding, prompt, response, padding]; the model sees the real tokens of all rows end to
end. The log-probability (or value) of a response token is read at the token before it. Results
come back as (B, T), zero where a response has no token.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from verl.models.shared_prompts import SharedPrompts
from verl.models.ulysses import SequenceShare
from verl.utils.device import without_waiting

PACKED_COLUMNS = ("input_ids", "position_ids", "sources", "targets", "places")


@dataclass(frozen=True)
class PackedRows:
    """The tokens of some rows end to end, and where their responses are: R tokens in all."""

    input_ids: Tensor
    """(N,) tokens."""

    position_ids: Tensor
    """(N,) position of each token in its own sequence."""

    parts: list[int] | SharedPrompts
    """Tokens of each sequence, or how prompts are shared."""

    sources: Tensor
    """(R,) the token whose hidden state predicts each response token."""

    targets: Tensor
    """(R,) the response tokens."""

    places: Tensor
    """(R,) where each belongs in the flattened (B, T) response block."""

    shape: tuple[int, int]
    """(B, T)."""

    gather: Callable[[Tensor], Tensor] | None = None
    """Where ranks divide the tokens: from this rank's values to all (R,) of them."""

    def unpack(self, values: Tensor) -> Tensor:
        """(R,) values to their places in (B, T), zeros elsewhere; differentiable."""
        if self.gather is not None:
            values = self.gather(values)
        blank = values.new_zeros(self.shape[0] * self.shape[1])
        return blank.index_copy(0, self.places, values).view(self.shape)

    def to(self, device: torch.device) -> "PackedRows":
        """On the device, without waiting for it."""
        columns = {name: without_waiting(getattr(self, name), device) for name in PACKED_COLUMNS}
        return replace(self, **columns)

    def part(self, share: SequenceShare) -> "PackedRows":
        """The tokens, sources and targets of one of the ranks that divide them."""
        return replace(
            self,
            input_ids=share.cut(self.input_ids),
            position_ids=share.cut(self.position_ids),
            sources=share.sources,
            targets=self.targets[share.rows],
            gather=share.gather,
        )


def pack_rows(
    input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, num_response_columns: int
) -> PackedRows:
    """Drop the padding of (B, L) rows; the last `num_response_columns` columns are the response."""
    real = attention_mask.bool()
    lengths = real.sum(1)
    is_response = real.clone()
    is_response[:, : real.shape[1] - num_response_columns] = False
    first = is_response.int().argmax(1) if num_response_columns else lengths
    starts_with_response = is_response.any(1) & ~(real & (arange_like(real) < first[:, None])).any(
        1
    )
    if starts_with_response.any():
        row = int(starts_with_response.nonzero()[0])
        raise ValueError(
            f"row {row} has a response but no prompt token; the first response token has nothing "
            "to be predicted from: give every prompt at least one token (a BOS token will do)"
        )
    packed_index = real.flatten().cumsum(0).view_as(real) - 1
    return PackedRows(
        input_ids=input_ids[real],
        position_ids=position_ids[real],
        parts=lengths.tolist(),
        sources=packed_index[is_response] - 1,
        targets=input_ids[is_response],
        places=is_response[:, real.shape[1] - num_response_columns :]
        .flatten()
        .nonzero()
        .squeeze(1),
        shape=(real.shape[0], num_response_columns),
    )


def arange_like(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1], device=x.device)[None, :]

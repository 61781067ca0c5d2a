"""From the padded rows of a batch to packed tokens, and back.

A row is [padding, prompt, response, padding]; the model sees the real tokens of all rows end to
end. The log-probability (or value) of a response token is read at the token before it. Results
come back as (B, T), zero where a response has no token.

Packed rows in which samples of one prompt share it: prompts first, then all responses.

Rows have the same prompt when its tokens and positions are the same, whoever made them. Responses
keep their places in the batch, so what comes out of a pass does not show how it was packed.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from tensordict import TensorDict
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


FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)
"""An odd number; its powers give each column another weight."""


def pack_shared_rows(
    input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, num_response_columns: int
) -> PackedRows:
    """As `pack_rows`, but each prompt once; as `pack_rows` where all prompts differ."""
    num_rows, width = attention_mask.shape
    prompt, response = (
        slice(0, width - num_response_columns),
        slice(width - num_response_columns, None),
    )
    real = attention_mask.bool()
    owner = same_rows(
        torch.where(real, input_ids, -1)[:, prompt], torch.where(real, position_ids, -1)[:, prompt]
    )
    num_prompts = int(owner.max()) + 1 if num_rows else 0
    if num_prompts == num_rows or not bool(real[:, prompt].any(1).all()):
        return pack_rows(input_ids, attention_mask, position_ids, num_response_columns)
    order = owner.argsort(stable=True)
    owner = owner[order]
    first = order[torch.searchsorted(owner, torch.arange(num_prompts, device=owner.device))]
    is_prompt, is_response = real[first][:, prompt], real[order][:, response]
    prompt_lengths, sample_lengths = is_prompt.sum(1), is_response.sum(1)
    sources = response_sources(is_response, prompt_lengths, owner)
    places = order[:, None] * num_response_columns + torch.arange(
        num_response_columns, device=order.device
    )
    ids, positions = (
        torch.cat([x[first][:, prompt][is_prompt], x[order][:, response][is_response]])
        for x in (input_ids, position_ids)
    )
    counts = torch.cat([prompt_lengths, owner, sample_lengths]).tolist()  # one wait for the device
    shared = SharedPrompts(counts[:num_prompts], counts[num_prompts:-num_rows], counts[-num_rows:])
    return PackedRows(
        input_ids=ids,
        position_ids=positions,
        parts=shared,
        sources=sources,
        targets=ids[shared.num_prompt_tokens :],
        places=places[is_response],
        shape=(num_rows, num_response_columns),
    )


def prompt_groups(data: TensorDict) -> list[int]:
    """A label for each row, the same for responses to one prompt: passes keep them together."""
    num_columns = data["input_ids"].shape[1] - data["responses"].shape[1]
    ids, mask = (data[name][:, :num_columns] for name in ("input_ids", "attention_mask"))
    return same_rows(torch.where(mask.bool(), ids, -1)).tolist()


def same_rows(*columns: Tensor) -> Tensor:
    """A number for each row, (B,), the same for rows that are equal in all of the (B, n) columns.

    Rows are compared by a hash and then, where that says equal, by their elements.
    """
    whole = torch.cat(columns, 1)
    powers = torch.full((whole.shape[1],), FACTOR, device=whole.device).cumprod(0)  # wraps around
    _, number = ((whole + 1) * powers).sum(1).unique(return_inverse=True)
    order = number.argsort(stable=True)
    is_new = torch.ones_like(number, dtype=torch.bool)
    is_new[1:] = (whole[order[1:]] != whole[order[:-1]]).any(1)
    found = torch.empty_like(number)
    found[order] = is_new.cumsum(0) - 1
    return found


def response_sources(is_response: Tensor, prompt_lengths: Tensor, owner: Tensor) -> Tensor:
    """The token that predicts each response token: the one before it, or the prompt's last."""
    ends = prompt_lengths.cumsum(0)
    index = is_response.flatten().cumsum(0).view_as(is_response) - 1 + ends[-1]
    is_first = is_response & (is_response.cumsum(1) == 1)
    return torch.where(is_first, (ends - 1)[owner][:, None], index - 1)[is_response]

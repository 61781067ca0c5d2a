"""Packed rows in which samples of one prompt share it: prompts first, then all responses.

Rows have the same prompt when its tokens and positions are the same, whoever made them. Responses
keep their places in the batch, so what comes out of a pass does not show how it was packed.
"""

import torch
from tensordict import TensorDict
from torch import Tensor

from verl.models.shared_prompts import SharedPrompts
from verl.workers.engine.packing import PackedRows, pack_rows

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

"""Rows of equal length: padding, cutting, and the masks that say which tokens are real."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from verl.utils.jagged import jagged, offsets_of, open_jagged


def get_response_mask(
    response_id: Tensor, eos_token: int | list[int] = 2, dtype: torch.dtype = torch.int64
) -> Tensor:
    """1 up to and including the first end-of-sequence token, then 0: (B, T) -> (B, T).

    The end token is part of the answer (it must be learned); a row without one is kept whole.
    """
    is_end = torch.isin(response_id, torch.tensor(eos_token, device=response_id.device)).long()
    ends_before = is_end.cumsum(-1) - is_end
    return (ends_before == 0).to(dtype)


get_eos_mask = get_response_mask


def pad_2d_list_to_length(
    response: Sequence[Sequence[int]], pad_token_id: int, max_length: int | None = None
) -> Tensor:
    """One row per list, padded on the right to the longest list, or to `max_length` if longer."""
    length = max([max_length or 0, *map(len, response)])
    return torch.tensor([[*row, *[pad_token_id] * (length - len(row))] for row in response])


def pad_sequence_to_length(
    tensors: Tensor, max_seq_len: int, pad_token_id: float, left_pad: bool = False
) -> Tensor:
    """Pad the last dimension to `max_seq_len`; what is that long already is returned as it is."""
    missing = max_seq_len - tensors.shape[-1]
    if missing <= 0:
        return tensors
    return functional.pad(tensors, (missing, 0) if left_pad else (0, missing), value=pad_token_id)


def postprocess_data(
    input_ids: Tensor,
    attention_mask: Tensor,
    max_length: int,
    pad_token_id: int,
    left_pad: bool = True,
    truncation: str = "error",
) -> tuple[Tensor, Tensor]:
    """Bring (B, L) ids and mask to exactly `max_length`: pad what is short, cut what is long.

    `truncation` names the side that is lost: "left", "right", "middle" (the first half and the
    last half stay), or "error" to refuse.
    """
    if truncation not in ("error", *_KEPT):
        known = ", ".join(["error", *_KEPT])
        raise ValueError(f"truncation is {truncation!r}; it must be one of: {known}")
    if input_ids.shape != attention_mask.shape or input_ids.ndim != 2:
        raise ValueError(
            f"input_ids {tuple(input_ids.shape)} and attention_mask "
            f"{tuple(attention_mask.shape)} must have one shape (rows, tokens)"
        )
    length = input_ids.shape[-1]
    if length > max_length:
        if truncation == "error":
            raise ValueError(
                f"a sequence of {length} tokens is longer than max_length {max_length}; raise the "
                "limit, filter such rows, or set truncation to left, right or middle"
            )
        keep = _KEPT[truncation]
        return keep(input_ids, max_length), keep(attention_mask, max_length)
    return (
        pad_sequence_to_length(input_ids, max_length, pad_token_id, left_pad),
        pad_sequence_to_length(attention_mask, max_length, 0, left_pad),
    )


def _keep_ends(rows: Tensor, max_length: int) -> Tensor:
    head = max_length // 2
    return torch.cat([rows[:, :head], rows[:, rows.shape[-1] - (max_length - head) :]], dim=-1)


_KEPT: dict[str, Callable[[Tensor, int], Tensor]] = {
    "left": lambda rows, max_length: rows[:, rows.shape[-1] - max_length :],
    "right": lambda rows, max_length: rows[:, :max_length],
    "middle": _keep_ends,
}


def tokenize_and_postprocess_data(
    prompt: str,
    tokenizer: Any,
    max_length: int,
    pad_token_id: int,
    left_pad: bool = True,
    truncation: str = "error",
) -> tuple[Tensor, Tensor]:
    """Tokenize text that carries its special tokens, then `postprocess_data`: two (1, L)."""
    encoded = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    return postprocess_data(
        encoded["input_ids"],
        encoded["attention_mask"],
        max_length,
        pad_token_id,
        left_pad=left_pad,
        truncation=truncation,
    )


def remove_pad_token(input_ids: Tensor, attention_mask: Tensor) -> list[list[int]]:
    """The real tokens of each row, as lists."""
    return [ids[mask.bool()].tolist() for ids, mask in zip(input_ids, attention_mask, strict=True)]


def expand_as_nested(tensor: Tensor, nested_tensor: Tensor) -> Tensor:
    """Give each token of a jagged tensor its sequence's value: (B, ...) -> jagged (B, j, ...)."""
    if not nested_tensor.is_nested or nested_tensor.layout != torch.jagged:
        raise ValueError("expand_as_nested needs a nested tensor with layout torch.jagged")
    if tensor.shape[0] != nested_tensor.shape[0]:
        raise ValueError(
            f"{tensor.shape[0]} values cannot be spread over {nested_tensor.shape[0]} sequences"
        )
    parts = open_jagged(nested_tensor)
    values = tensor.repeat_interleave(parts.row_lengths, dim=0)
    return jagged(values, offsets_of(parts.row_lengths), dim=1)

"""Padded rows and packed tokens, and the way between them.

`unpad_input` and `pad_input` are for code written for FlashAttention's helpers; they need torch
alone. `left_right_2_no_padding` and `no_padding_2_padding` do the same for whole batches, whose
prompts are padded on the left and whose responses are padded on the right.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from verl.utils.import_utils import require


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """x[indices]; gradients flow back to the rows that were taken."""
    return x.index_select(0, indices)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The (N, ...) tokens of (B, L, ...) rows: tokens, indices, boundaries, longest row, lengths.

    `unused_mask` marks tokens that are kept in place without being counted.
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)  # (B,)
    indices = kept.flatten().nonzero().flatten()  # (N,)
    boundaries = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))  # (B + 1,)
    used = attention_mask.sum(-1, dtype=torch.int32)
    tokens = index_first_axis(hidden_states.flatten(0, 1), indices)
    return tokens, indices, boundaries, int(lengths.max()), used


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """(B, L, ...) rows with the (N, ...) tokens at `indices` and zero elsewhere."""
    rows = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    return rows.index_copy(0, indices, hidden_states).unflatten(0, (batch, seqlen))


def rearrange(tensor: Tensor, pattern: str, **sizes: int) -> Tensor:
    """`einops.rearrange`; the pattern of FlashAttention's callers needs no package."""
    if pattern == "b s ... -> (b s) ...":
        return tensor.flatten(0, 1)
    return require("einops").rearrange(tensor, pattern, **sizes)


def left_right_2_no_padding(data: Any) -> Any:
    """Replace the padded columns of a batch by ragged ones, in place.

    `input_ids` and `position_ids` (B, L) become nested (B, l); `response_mask` (B, T) becomes the
    nested `loss_mask` of the same tokens; `max_seq_len` and `max_response_len` say what they were.
    """
    mask, response_mask = data["attention_mask"].bool(), data["response_mask"]
    loss_mask = F.pad(response_mask, (mask.shape[1] - response_mask.shape[1], 0))
    for name, rows in (
        ("input_ids", data["input_ids"]),
        ("position_ids", data["position_ids"]),
        ("loss_mask", loss_mask),
    ):
        parts = [row[kept] for row, kept in zip(rows, mask, strict=True)]
        data[name] = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
    return data


def no_padding_2_padding(nested_tensor: Tensor, data: Any) -> Tensor:
    """(B, T) values of responses from nested values of whole sequences.

    The value at a position is about the token after it, as log-probabilities and values are: those
    of a response begin at the last position of its prompt.
    """
    num_columns = data["responses"].shape[1]
    lengths = data["attention_mask"][:, -num_columns:].sum(-1).tolist()
    rows = []
    for values, length in zip(nested_tensor.unbind(), lengths, strict=True):
        taken = values[len(values) - length - 1 : len(values) - 1]
        rows.append(F.pad(taken, (0, num_columns - length)))
    return torch.stack(rows)

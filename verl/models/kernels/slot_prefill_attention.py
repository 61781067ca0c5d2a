"""Causal attention of several new tokens per sequence over keys and values kept in slots. Triton.

The new tokens' own keys and values are in the slots already, behind those of tokens that an earlier
turn has left there: nothing is gathered. A program takes one KV head and a few consecutive new
tokens of one sequence, as in `packed_attention`, and finds keys as `decode_attention` does: in the
prompt's slot and the sequence's own, or in its pages. The loop is that of both, with the same bits.
"""

# Types do not know `kernel[grid](...)`.
# pyright: reportIndexIssue=false

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from verl.models.kernels.attention_blocks import (
    BLOCK,
    LAUNCH,
    SMALLEST_DOT,
    attend,
    initial_state,
    with_sink,
)
from verl.models.kernels.packed_attention import (
    launch_options,
    num_queries,
    tile_columns,
    tokens_per_tile,
)
from verl.utils.device import without_waiting


@dataclass(frozen=True)
class SlotContinuation:
    """`length` new tokens of a pass from `start` on, after `num_known` others in the slots."""

    start: int
    length: int
    num_known: int
    num_shared: int
    """Tokens, known and new ones, in the prompt slot; the rest are in the sequence's own."""

    prompt_slot: int
    slot: int
    """Or the line of the page table."""


class SlotTiles:
    """The sequences cut into pieces, one program each; int32 columns on the device."""

    NUM_COLUMNS = 7

    def __init__(
        self, sequences: Sequence[SlotContinuation], num_tokens: int, device: torch.device
    ) -> None:
        """`num_tokens` are the tokens of a piece."""
        table = np.array(
            [
                (s.start, s.length, s.num_known, s.num_shared, s.prompt_slot, s.slot)
                for s in sequences
            ],
            dtype=np.int32,
        ).reshape(-1, 6)
        columns = tile_columns(table, num_tokens)
        self.columns = without_waiting(torch.from_numpy(columns), device)  # (7, pieces)
        self.num_tokens = int(table[:, 1].sum())


def slot_prefill_attention(
    query: Tensor,
    prompt: tuple[Tensor, Tensor],
    response: tuple[Tensor, Tensor],
    tiles: SlotTiles,
    *,
    pages: Tensor | None = None,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """(N, heads, value dim) for queries (N, heads, D); tokens of no sequence get zeros.

    `prompt` and `response` are keys and values (slots, KV heads, tokens, D); with `pages`, a table
    (lines, blocks) int32, `response` is pages and `prompt` is not looked at.
    """
    (num_tokens, num_heads, key_dim), (keys, values) = query.shape, response
    num_kv_heads, value_dim = values.shape[1], values.shape[3]
    query = query if query.stride(-1) == 1 else query.contiguous()
    if pages is not None or not prompt[0].shape[2]:  # nothing is shared: any pointer will do
        prompt = response
    output = query.new_empty(num_tokens, num_heads, value_dim)
    if tiles.num_tokens < num_tokens:
        output.zero_()
    heads = num_heads // num_kv_heads
    num_rows = max(num_queries(query), triton.next_power_of_2(heads))
    _slot_prefill[(tiles.columns.shape[1], num_kv_heads)](
        query, *prompt, *response, output, *tiles.columns,
        tiles.columns if pages is None else pages, query if sinks is None else sinks,
        scaling, softcap or 0.0, 0 if pages is None else pages.stride(0),
        *query.stride()[:2], *prompt[0].stride()[:3], *prompt[1].stride()[:3],
        *keys.stride()[:3], *values.stride()[:3],
        HEADS=heads,
        TOKENS=tokens_per_tile(query, keys),
        ROWS=num_rows,
        KEY_DIM=key_dim,
        KEY_PADDED=max(SMALLEST_DOT, triton.next_power_of_2(key_dim)),
        VALUE_DIM=value_dim,
        VALUE_PADDED=max(SMALLEST_DOT, triton.next_power_of_2(value_dim)),
        BLOCK=BLOCK,
        WINDOW=sliding_window or 0,
        HAS_SOFTCAP=softcap is not None,
        HAS_SINKS=sinks is not None,
        PAGED=pages is not None,
        **launch_options(query, num_rows),
        **LAUNCH,
    )  # fmt: skip
    return output


@triton.jit
def _slot_prefill(
    query, prompt_keys, prompt_values, own_keys, own_values, output,
    offsets, starts, lengths, num_knowns, num_shareds, prompt_slots, slots,
    pages, sinks, scale, softcap, pages_slot, q_token, q_head,
    pk_slot, pk_head, pk_token, pv_slot, pv_head, pv_token,
    ok_slot, ok_head, ok_token, ov_slot, ov_head, ov_token,
    HEADS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    KEY_DIM: tl.constexpr, KEY_PADDED: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_PADDED: tl.constexpr,
    BLOCK: tl.constexpr, WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, PAGED: tl.constexpr,
):  # fmt: skip
    tile, kv_head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    offset, start = tl.load(offsets + tile), tl.load(starts + tile).to(tl.int64)
    length, num_known = tl.load(lengths + tile), tl.load(num_knowns + tile)
    num_shared = tl.load(num_shareds + tile)
    prompt_slot = tl.load(prompt_slots + tile).to(tl.int64)
    slot = tl.load(slots + tile).to(tl.int64)

    rows = tl.arange(0, ROWS)
    index, head = offset + rows // HEADS, kv_head * HEADS + rows % HEADS
    is_query = (rows < TOKENS * HEADS) & (index < length)
    token = start + index
    k_dim, v_dim = tl.arange(0, KEY_PADDED), tl.arange(0, VALUE_PADDED)
    q = tl.load(
        query + (token * q_token + head * q_head)[:, None] + k_dim[None, :],
        mask=is_query[:, None] & (k_dim < KEY_DIM)[None, :],
        other=0.0,
    )
    prompt_k, prompt_v = prompt_keys + kv_head * pk_head, prompt_values + kv_head * pv_head
    own_k, own_v = own_keys + kv_head * ok_head, own_values + kv_head * ov_head
    if PAGED:
        pages += slot * pages_slot
    else:
        prompt_k += prompt_slot * pk_slot
        prompt_v += prompt_slot * pv_slot
        own_k += slot * ok_slot
        own_v += slot * ov_slot
    first = offset * 0
    if WINDOW > 0:
        first = tl.maximum(num_known + offset - WINDOW + 1, 0)
    max_score, denominator, accumulator = initial_state(ROWS, VALUE_PADDED)
    max_score, denominator, accumulator = attend(
        max_score, denominator, accumulator, q, num_known + index,
        first, num_known + tl.minimum(offset + TOKENS, length), num_shared, None, scale, softcap,
        prompt_k, prompt_v, pk_token, pv_token, own_k, own_v, ok_token, ov_token,
        KEY_DIM, KEY_PADDED, VALUE_DIM, VALUE_PADDED, BLOCK, WINDOW, HAS_SOFTCAP, True,
        False, pages, pk_slot, pv_slot, PAGED,
    )  # fmt: skip
    denominator = tl.max(denominator, 1)
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=is_query, other=0.0).to(tl.float32)
        max_score, denominator, accumulator = with_sink(max_score, denominator, accumulator, sink)
    accumulator = accumulator / denominator[:, None]
    number = token * HEADS * tl.num_programs(1) + head
    tl.store(
        output + (number * VALUE_DIM)[:, None] + v_dim[None, :],
        accumulator.to(output.dtype.element_ty),
        mask=is_query[:, None] & (v_dim < VALUE_DIM)[None, :],
    )

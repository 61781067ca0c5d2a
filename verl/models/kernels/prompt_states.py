"""The prompt's part of decode attention, read once for neighbouring rows that share it. Triton.

Samples of one prompt stand side by side, so a program takes a few neighbours and goes over the
prompt of the first of them, for all that have the same. What it leaves of each query (largest
score, sum of weights, weighted values) is what that row alone would know after so many keys, to the
last bit; `decode_attention` goes on from there. Rows with another prompt than the first of their
tile begin at its start. With pages, the prompt's are those at the front of the first row's.
"""

# Types do not know `kernel[grid](...)`.
# pyright: reportIndexIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from verl.models.kernels.attention_blocks import (
    BLOCK,
    LAUNCH,
    SMALLEST_DOT,
    nothing_seen,
    stages_of_pages,
    visit,
)
from verl.models.kernels.shared_memory import rows_that_fit, stages_that_fit

ROWS = 64
"""Queries of a program: a few rows with all query heads of a KV head."""

NUM_WARPS = 4
NUM_STAGES, NUM_STAGES_OF_WIDE_HEADS = 3, 2


def prompt_states(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    prompt_slot: Tensor,
    num_shared: Tensor,
    *,
    slot: Tensor,
    pages: Tensor | None,
    scaling: float,
    softcap: float | None,
    is_overtaken: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Prompt tokens seen so far (B,), and top, total (B, heads) and mix (B, heads, value dim).

    Queries are (B, heads, D), keys and values prompt slots (slots, KV heads, tokens, D) or, with
    `pages` (slots, blocks), pages. Whole blocks of keys only; where none was seen the rest is not
    written. With `is_overtaken` the next kernel may begin before the end of this one, if it was
    launched like that.
    """
    num_rows, num_heads, key_dim = query.shape
    num_kv_heads, value_dim = values.shape[1], values.shape[3]
    heads = num_heads // num_kv_heads
    tile = max(1, previous_power_of_2(rows_that_fit(ROWS, query, num_keys=BLOCK) // heads))
    num_queries = max(SMALLEST_DOT, triton.next_power_of_2(tile * heads))
    num_seen = torch.empty(num_rows, dtype=torch.int32, device=query.device)
    top, total = (query.new_empty(num_rows, num_heads, dtype=torch.float32) for _ in range(2))
    mix = query.new_empty(num_rows, num_heads, value_dim, dtype=torch.float32)
    num_stages = NUM_STAGES if key_dim <= 64 else NUM_STAGES_OF_WIDE_HEADS
    is_paged = pages is not None
    if is_paged:
        num_stages = stages_of_pages(num_stages, key_dim)
    _prompt_states[(triton.cdiv(num_rows, tile), num_kv_heads)](
        query, keys, values, prompt_slot, num_shared, num_seen, top, total, mix,
        slot, slot if pages is None else pages, scaling, softcap or 0.0, num_rows,
        0 if pages is None else pages.stride(0),
        *query.stride()[:2], *keys.stride()[:3], *values.stride()[:3],
        HEADS=heads,
        TILE=tile,
        ROWS=num_queries,
        KEY_DIM=key_dim,
        KEY_PADDED=max(SMALLEST_DOT, triton.next_power_of_2(key_dim)),
        VALUE_DIM=value_dim,
        VALUE_PADDED=max(SMALLEST_DOT, triton.next_power_of_2(value_dim)),
        BLOCK=BLOCK,
        HAS_SOFTCAP=softcap is not None,
        IS_OVERTAKEN=is_overtaken,
        PAGED=is_paged,
        num_warps=NUM_WARPS,
        num_stages=stages_that_fit(
            num_stages, query, num_queries, num_keys=BLOCK, is_paged=is_paged
        ),
        **LAUNCH,
    )  # fmt: skip
    return num_seen, top, total, mix


def previous_power_of_2(number: int) -> int:
    """The largest that is not above it; 0 for 0."""
    return 1 << (number.bit_length() - 1) if number else 0


@triton.jit
def _prompt_states(
    query, keys, values, prompt_slots, num_shareds, num_seens, tops, totals, mixes,
    slots, pages, scale, softcap, num_rows, pages_slot,
    q_row, q_head, k_slot, k_head, k_token, v_slot, v_head, v_token,
    HEADS: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
    KEY_DIM: tl.constexpr, KEY_PADDED: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_PADDED: tl.constexpr,
    BLOCK: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    IS_OVERTAKEN: tl.constexpr, PAGED: tl.constexpr,
):  # fmt: skip
    if IS_OVERTAKEN:
        gdc_launch_dependents()
    first_row, kv_head = tl.program_id(0).to(tl.int64) * TILE, tl.program_id(1).to(tl.int64)
    slot, num_shared = tl.load(prompt_slots + first_row), tl.load(num_shareds + first_row)
    num_seen = (num_shared // BLOCK * BLOCK).to(tl.int32)

    queries = tl.arange(0, ROWS)
    row, head = first_row + queries // HEADS, kv_head * HEADS + queries % HEADS
    is_query = (queries < TILE * HEADS) & (row < num_rows)
    own_slot = tl.load(prompt_slots + row, mask=is_query, other=-1)
    own_shared = tl.load(num_shareds + row, mask=is_query, other=-1)
    is_same = is_query & (own_slot == slot) & (own_shared == num_shared)
    k_dim, v_dim = tl.arange(0, KEY_PADDED), tl.arange(0, VALUE_PADDED)
    q = tl.load(
        query + (row * q_row + head * q_head)[:, None] + k_dim[None, :],
        mask=is_same[:, None] & (k_dim < KEY_DIM)[None, :],
        other=0.0,
    )
    prompt_keys = keys + kv_head * k_head
    prompt_values = values + kv_head * v_head
    if PAGED:
        pages += tl.load(slots + first_row) * pages_slot
    else:
        prompt_keys += slot * k_slot
        prompt_values += slot * v_slot
    top, total, mix = nothing_seen(ROWS, VALUE_PADDED)
    top, total, mix = visit(
        top, total, mix, q, tl.zeros([ROWS], tl.int32) + num_seen, num_seen * 0, num_seen, num_seen,
        None, scale, softcap,
        prompt_keys, prompt_values, k_token, v_token, prompt_keys, prompt_values, k_token, v_token,
        KEY_DIM, KEY_PADDED, VALUE_DIM, VALUE_PADDED, BLOCK, 0, HAS_SOFTCAP, True,
        False, pages, k_slot, v_slot, PAGED,
    )  # fmt: skip
    state = row * HEADS * tl.num_programs(1) + head
    # Every KV head's program writes the same here.
    tl.store(num_seens + row, tl.where(is_same, num_seen, 0), mask=is_query)
    tl.store(tops + state, top, mask=is_same)
    tl.store(totals + state, tl.max(total, 1), mask=is_same)
    tl.store(
        mixes + state[:, None] * VALUE_DIM + v_dim[None, :],
        mix,
        mask=is_same[:, None] & (v_dim < VALUE_DIM)[None, :],
    )

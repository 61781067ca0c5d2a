"""Attention of one new token per row over keys and values kept in slots. Triton.

    prompt slots    (slots, KV heads, tokens, head dim)   shared by the samples of a prompt
    response slots  (slots, KV heads, tokens, head dim)   one per row
or  pages           (pages, KV heads, BLOCK, head dim)    of both; a table says which hold a row

A program takes one row and one KV head with all query heads of that head. It writes the new token's
key and value into the row's slot and then goes over the prompt and the row's own tokens. Lengths
are read on the device: nothing here depends on what the host knows, so a captured graph stays valid
as rows grow.

Where neighbouring rows are samples of one prompt, a first kernel goes over the prompt for all of
them (`prompt_states`). What it leaves of each query (max score, denominator, accumulator) is what
that row alone would know after so many keys, to the last bit; the row's program goes on from there.
Rows with another prompt than the first of their tile begin at its start. With pages, the prompt's
are those at the front of the first row's. On devices that can, the second kernel begins beside the
first and waits for its end before it reads what it left.
"""

# Types do not know `kernel[grid](...)`.
# pyright: reportIndexIssue=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from verl.models.kernels.attention_blocks import (
    BLOCK,
    LAUNCH,
    LOWEST,
    SMALLEST_DOT,
    attend,
    initial_state,
    stages_of_pages,
    with_sink,
)
from verl.models.kernels.availability import can_start_early, rows_that_fit, stages_that_fit

NUM_WARPS, NUM_WARPS_OF_WIDE_HEADS = 4, 2
NUM_STAGES = 3
WIDEST_OF_NARROW_HEADS = 64
"""Wider ones need more registers than there are, unless addresses take few."""


@dataclass(frozen=True, eq=False)
class SlotRows:
    """Where the rows' keys are and how many there are; int64 tensors (B,)."""

    prompt_slot: Tensor
    slot: Tensor
    num_shared: Tensor
    """Tokens of the row's prompt slot that it sees."""

    slot_position: Tensor
    """Position of the new token in its own slot; it attends to all before it."""

    pages: Tensor | None = None
    """(slots, blocks) int32: page [s, k] holds the tokens from position k * BLOCK on of the row
    with slot s, its prompt's first. None where slots are not cut into pages."""


def slot_decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    prompt: tuple[Tensor, Tensor],
    response: tuple[Tensor, Tensor],
    rows: SlotRows,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """(B, heads, value dim) for query (B, heads, D) and the new tokens' key and value (B, KV, D).

    Writes `key` and `value` into the rows' response slots. With pages, `prompt` is not looked at.
    """
    num_rows, num_heads, key_dim = query.shape
    num_kv_heads, value_dim = value.shape[1:]
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    output = torch.empty(num_rows, num_heads, value_dim, dtype=query.dtype, device=query.device)
    is_paged = rows.pages is not None
    has_prompts = is_paged or prompt[0].shape[2] > 0
    if is_paged or not has_prompts:  # where nothing is shared any pointer will do
        prompt = response
    has_states = sliding_window is None and has_prompts
    is_wide = key_dim > WIDEST_OF_NARROW_HEADS
    heads_padded = max(SMALLEST_DOT, triton.next_power_of_2(num_heads // num_kv_heads))
    num_stages = stages_of_pages(NUM_STAGES, key_dim) if is_paged else NUM_STAGES
    has_one_step = all(x.stride(2) == y.stride(2) for x, y in zip(prompt, response, strict=True))
    starts_early = has_states and can_start_early(query.device)
    states = (query,) * 4  # not read without states
    if has_states:
        states = prompt_states(
            query, *prompt, rows.prompt_slot, rows.num_shared,
            slot=rows.slot, pages=rows.pages,
            scaling=scaling, softcap=softcap, is_overtaken=starts_early,
        )  # fmt: skip
    _slot_decode[(num_rows, num_kv_heads)](
        query, key, value, *prompt, *response, output, *states,
        rows.prompt_slot, rows.slot, rows.num_shared, rows.slot_position,
        rows.slot if rows.pages is None else rows.pages,
        query if sinks is None else sinks, scaling, softcap or 0.0,
        0 if rows.pages is None else rows.pages.stride(0),
        *query.stride()[:2], *key.stride()[:2], *value.stride()[:2],
        *prompt[0].stride()[:3], *prompt[1].stride()[:3],
        *response[0].stride()[:3], *response[1].stride()[:3],
        HEADS=num_heads // num_kv_heads,
        HEADS_PADDED=heads_padded,
        KEY_DIM=key_dim,
        KEY_PADDED=max(SMALLEST_DOT, triton.next_power_of_2(key_dim)),
        VALUE_DIM=value_dim,
        VALUE_PADDED=max(SMALLEST_DOT, triton.next_power_of_2(value_dim)),
        BLOCK=BLOCK,
        WINDOW=sliding_window or 0,
        HAS_SOFTCAP=softcap is not None,
        HAS_SINKS=sinks is not None,
        HAS_STATES=has_states,
        ONE_STEP=is_wide and has_one_step and not is_paged,
        STARTS_EARLY=starts_early,
        PAGED=is_paged,
        num_warps=NUM_WARPS_OF_WIDE_HEADS if is_wide else NUM_WARPS,
        num_stages=stages_that_fit(
            num_stages, query, heads_padded, num_keys=BLOCK, is_paged=is_paged
        ),
        **LAUNCH | ({"launch_pdl": True} if starts_early else {}),
    )  # fmt: skip
    return output


@triton.jit
def _slot_decode(
    query, key, value, prompt_keys, prompt_values, own_keys, own_values, output,
    num_seens, max_scores, denominators, accumulators,
    prompt_slots, slots, num_shareds, slot_positions, pages,
    sinks, scale, softcap, pages_slot,
    q_row, q_head, k_row, k_head, v_row, v_head,
    pk_slot, pk_head, pk_token, pv_slot, pv_head, pv_token,
    ok_slot, ok_head, ok_token, ov_slot, ov_head, ov_token,
    HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr,
    KEY_DIM: tl.constexpr, KEY_PADDED: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_PADDED: tl.constexpr,
    BLOCK: tl.constexpr, WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_STATES: tl.constexpr,
    ONE_STEP: tl.constexpr, STARTS_EARLY: tl.constexpr, PAGED: tl.constexpr,
):  # fmt: skip
    row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    prompt_slot, slot = tl.load(prompt_slots + row), tl.load(slots + row)
    num_shared = tl.load(num_shareds + row).to(tl.int32)
    slot_position = tl.maximum(tl.load(slot_positions + row), 0).to(tl.int32)  # -1 in unused rows
    position = num_shared + slot_position

    heads = tl.arange(0, HEADS_PADDED)
    k_dim, v_dim = tl.arange(0, KEY_PADDED), tl.arange(0, VALUE_PADDED)
    is_head, is_k, is_v = heads < HEADS, k_dim < KEY_DIM, v_dim < VALUE_DIM
    first_head = kv_head * HEADS
    q = tl.load(
        query + row * q_row + (first_head + heads[:, None]) * q_head + k_dim[None, :],
        mask=is_head[:, None] & is_k[None, :],
        other=0.0,
    )
    new_k = tl.load(key + row * k_row + kv_head * k_head + k_dim, mask=is_k, other=0.0)
    new_v = tl.load(value + row * v_row + kv_head * v_head + v_dim, mask=is_v, other=0.0)
    prompt_k = prompt_keys + kv_head * pk_head
    prompt_v = prompt_values + kv_head * pv_head
    own_k = own_keys + kv_head * ok_head
    own_v = own_values + kv_head * ov_head
    if PAGED:
        pages += slot * pages_slot
        page = tl.load(pages + position // BLOCK).to(tl.int64)
        own_k += page * ok_slot
        own_v += page * ov_slot
        slot_position = position % BLOCK
    else:
        prompt_k += prompt_slot * pk_slot
        prompt_v += prompt_slot * pv_slot
        own_k += slot * ok_slot
        own_v += slot * ov_slot
    tl.store(
        own_k + slot_position * ok_token + k_dim, new_k.to(own_keys.dtype.element_ty), mask=is_k
    )
    tl.store(
        own_v + slot_position * ov_token + v_dim, new_v.to(own_values.dtype.element_ty), mask=is_v
    )
    tl.debug_barrier()  # the loop reads it back

    first = position * 0
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0)
    max_score, denominator, accumulator = initial_state(HEADS_PADDED, VALUE_PADDED)
    state = row * HEADS * tl.num_programs(1) + first_head + heads
    if STARTS_EARLY:
        gdc_wait()
    if HAS_STATES:
        first = tl.load(num_seens + row)
        max_score, denominator, accumulator = _behind_prompt(
            denominator, max_scores + state, denominators + state,
            accumulators + state * VALUE_DIM, is_head & (first > 0),
            VALUE_DIM, VALUE_PADDED,
        )  # fmt: skip
    max_score, denominator, accumulator = attend(
        max_score, denominator, accumulator, q, tl.zeros([HEADS_PADDED], tl.int32) + position,
        first, position + 1, num_shared, None, scale, softcap,
        prompt_k, prompt_v, pk_token, pv_token, own_k, own_v, ok_token, ov_token,
        KEY_DIM, KEY_PADDED, VALUE_DIM, VALUE_PADDED, BLOCK, WINDOW, HAS_SOFTCAP, False,
        ONE_STEP, pages, pk_slot, pv_slot, PAGED,
    )  # fmt: skip
    denominator = tl.max(denominator, 1)
    if HAS_SINKS:
        sink = tl.load(sinks + first_head + heads, mask=is_head, other=0.0).to(tl.float32)
        max_score, denominator, accumulator = with_sink(max_score, denominator, accumulator, sink)
    accumulator = accumulator / denominator[:, None]
    tl.store(
        output + state[:, None] * VALUE_DIM + v_dim[None, :],
        accumulator.to(output.dtype.element_ty),
        mask=is_head[:, None] & is_v[None, :],
    )


@triton.jit
def _behind_prompt(
    nothing,
    max_scores,
    denominators,
    accumulators,
    is_known,
    VALUE_DIM: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
):
    """What queries know after `prompt_states`; pointers are those of each query."""
    v_dim = tl.arange(0, VALUE_PADDED)
    max_score = tl.load(max_scores, mask=is_known, other=LOWEST)
    denominator = nothing + tl.load(denominators, mask=is_known, other=0.0)[:, None]
    accumulator = tl.load(
        accumulators[:, None] + v_dim[None, :],
        mask=is_known[:, None] & (v_dim < VALUE_DIM)[None, :],
        other=0.0,
    )
    return max_score, denominator, accumulator


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
    """Prompt tokens seen (B,), max score and denominator (B, heads), accumulator (B, heads, D).

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
    max_score, denominator = (
        query.new_empty(num_rows, num_heads, dtype=torch.float32) for _ in range(2)
    )
    accumulator = query.new_empty(num_rows, num_heads, value_dim, dtype=torch.float32)
    num_stages = NUM_STAGES if key_dim <= 64 else NUM_STAGES_OF_WIDE_HEADS
    is_paged = pages is not None
    if is_paged:
        num_stages = stages_of_pages(num_stages, key_dim)
    _prompt_states[(triton.cdiv(num_rows, tile), num_kv_heads)](
        query, keys, values, prompt_slot, num_shared, num_seen, max_score, denominator, accumulator,
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
    return num_seen, max_score, denominator, accumulator


def previous_power_of_2(number: int) -> int:
    """The largest that is not above it; 0 for 0."""
    return 1 << (number.bit_length() - 1) if number else 0


@triton.jit
def _prompt_states(
    query, keys, values, prompt_slots, num_shareds, num_seens,
    max_scores, denominators, accumulators,
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
    max_score, denominator, accumulator = initial_state(ROWS, VALUE_PADDED)
    max_score, denominator, accumulator = attend(
        max_score, denominator, accumulator, q, tl.zeros([ROWS], tl.int32) + num_seen,
        num_seen * 0, num_seen, num_seen, None, scale, softcap,
        prompt_keys, prompt_values, k_token, v_token, prompt_keys, prompt_values, k_token, v_token,
        KEY_DIM, KEY_PADDED, VALUE_DIM, VALUE_PADDED, BLOCK, 0, HAS_SOFTCAP, True,
        False, pages, k_slot, v_slot, PAGED,
    )  # fmt: skip
    state = row * HEADS * tl.num_programs(1) + head
    # Every KV head's program writes the same here.
    tl.store(num_seens + row, tl.where(is_same, num_seen, 0), mask=is_query)
    tl.store(max_scores + state, max_score, mask=is_same)
    tl.store(denominators + state, tl.max(denominator, 1), mask=is_same)
    tl.store(
        accumulators + state[:, None] * VALUE_DIM + v_dim[None, :],
        accumulator,
        mask=is_same[:, None] & (v_dim < VALUE_DIM)[None, :],
    )

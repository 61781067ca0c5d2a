"""Attention of one new token per row over keys and values kept in slots. Triton.

    prompt slots    (slots, KV heads, tokens, head dim)   shared by the samples of a prompt
    response slots  (slots, KV heads, tokens, head dim)   one per row

A program takes one row and one KV head with all query heads of that head. It starts its running
softmax from the new token, whose key and value it also writes into the row's slot, then goes over
the prompt and over the row's own tokens. Samples of one prompt are neighbours, so that what one
reads of the prompt the next finds in the cache of the chip. Lengths are read on the device:
nothing here depends on what the host knows, so a captured graph stays valid as rows grow.
"""

# Types do not know `kernel[grid](...)`.
# pyright: reportIndexIssue=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_TOKENS = 64
NUM_WARPS = 4
NUM_STAGES = 3
SMALLEST_DOT = 16
"""Rows that a matrix instruction takes; query heads are padded to them."""


@dataclass(frozen=True, eq=False)
class SlotRows:
    """Where the rows' keys are and how many there are; int64 tensors (B,)."""

    prompt_slot: Tensor
    slot: Tensor
    num_shared: Tensor
    """Tokens of the row's prompt slot that it sees."""

    place: Tensor
    """Where in its own slot the new token goes; it sees all before that."""


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

    Writes `key` and `value` into the rows' response slots.
    """
    num_rows, num_heads, key_dim = query.shape
    num_kv_heads, value_dim = value.shape[1:]
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    output = torch.empty(num_rows, num_heads, value_dim, dtype=query.dtype, device=query.device)
    if prompt[0].shape[2] == 0:  # nothing is shared; any pointer will do
        prompt = response
    _slot_decode[(num_rows, num_kv_heads)](
        query, key, value, *prompt, *response, output,
        rows.prompt_slot, rows.slot, rows.num_shared, rows.place,
        query if sinks is None else sinks, scaling, softcap or 0.0,
        *query.stride()[:2], *key.stride()[:2], *value.stride()[:2],
        *prompt[0].stride()[:3], *prompt[1].stride()[:3],
        *response[0].stride()[:3], *response[1].stride()[:3],
        HEADS=num_heads // num_kv_heads,
        HEADS_PADDED=max(SMALLEST_DOT, triton.next_power_of_2(num_heads // num_kv_heads)),
        KEY_DIM=key_dim,
        KEY_PADDED=max(SMALLEST_DOT, triton.next_power_of_2(key_dim)),
        VALUE_DIM=value_dim,
        VALUE_PADDED=max(SMALLEST_DOT, triton.next_power_of_2(value_dim)),
        BLOCK=BLOCK_TOKENS,
        WINDOW=sliding_window or 0,
        HAS_SOFTCAP=softcap is not None,
        HAS_SINKS=sinks is not None,
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
    )  # fmt: skip
    return output


@triton.jit
def _scores(q, k, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Scaled products of the queries with a block of keys, (heads, tokens) in fp32."""
    x = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if HAS_SOFTCAP:
        x = softcap * (2 * tl.sigmoid(2 * x / softcap) - 1)  # tanh
    return x


@triton.jit
def _visit(
    q, top, total, mix, keys, values, k_step, v_step, first, end, scale, softcap,
    KEY_DIM: tl.constexpr, KEY_PADDED: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_PADDED: tl.constexpr,
    BLOCK: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Let the running softmax (top, total, mix) see the tokens from `first` to `end` of a slot."""
    k_dim, v_dim = tl.arange(0, KEY_PADDED), tl.arange(0, VALUE_PADDED)
    for start in range(first // BLOCK * BLOCK, end, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        is_seen = (tokens >= first) & (tokens < end)
        k = tl.load(
            keys + tokens[:, None] * k_step + k_dim[None, :],
            mask=is_seen[:, None] & (k_dim < KEY_DIM)[None, :],
            other=0.0,
        )
        x = _scores(q, k, scale, softcap, HAS_SOFTCAP)
        x = tl.where(is_seen[None, :], x, float("-inf"))
        new_top = tl.maximum(top, tl.max(x, 1))
        p = tl.exp(x - new_top[:, None])
        shrink = tl.exp(top - new_top)
        v = tl.load(
            values + tokens[:, None] * v_step + v_dim[None, :],
            mask=is_seen[:, None] & (v_dim < VALUE_DIM)[None, :],
            other=0.0,
        )
        total = total * shrink + tl.sum(p, 1)
        mix = mix * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        top = new_top
    return top, total, mix


@triton.jit
def _slot_decode(
    query, key, value, prompt_keys, prompt_values, own_keys, own_values, output,
    prompt_slots, slots, num_shareds, places, sinks, scale, softcap,
    q_row, q_head, k_row, k_head, v_row, v_head,
    pk_slot, pk_head, pk_token, pv_slot, pv_head, pv_token,
    ok_slot, ok_head, ok_token, ov_slot, ov_head, ov_token,
    HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr,
    KEY_DIM: tl.constexpr, KEY_PADDED: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_PADDED: tl.constexpr,
    BLOCK: tl.constexpr, WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    prompt_slot, slot = tl.load(prompt_slots + row), tl.load(slots + row)
    num_shared = tl.load(num_shareds + row)
    place = tl.maximum(tl.load(places + row), 0)  # rows that nobody uses stand before the start

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
    own_k = own_keys + slot * ok_slot + kv_head * ok_head
    own_v = own_values + slot * ov_slot + kv_head * ov_head
    tl.store(own_k + place * ok_token + k_dim, new_k.to(own_keys.dtype.element_ty), mask=is_k)
    tl.store(own_v + place * ov_token + v_dim, new_v.to(own_values.dtype.element_ty), mask=is_v)

    top = tl.sum(q.to(tl.float32) * new_k.to(tl.float32)[None, :], 1) * scale
    if HAS_SOFTCAP:
        top = softcap * (2 * tl.sigmoid(2 * top / softcap) - 1)
    total = tl.full([HEADS_PADDED], 1.0, tl.float32)
    mix = tl.zeros([HEADS_PADDED, VALUE_PADDED], tl.float32) + new_v.to(tl.float32)[None, :]

    first_shared = num_shared * 0
    first_own = place * 0
    if WINDOW > 0:
        first_shared = tl.maximum(num_shared + place - WINDOW + 1, 0)
        first_own = tl.maximum(place - WINDOW + 1, 0)
    top, total, mix = _visit(
        q, top, total, mix,
        prompt_keys + prompt_slot * pk_slot + kv_head * pk_head,
        prompt_values + prompt_slot * pv_slot + kv_head * pv_head,
        pk_token, pv_token, first_shared, num_shared, scale, softcap,
        KEY_DIM, KEY_PADDED, VALUE_DIM, VALUE_PADDED, BLOCK, HAS_SOFTCAP,
    )  # fmt: skip
    top, total, mix = _visit(
        q, top, total, mix, own_k, own_v, ok_token, ov_token, first_own, place, scale, softcap,
        KEY_DIM, KEY_PADDED, VALUE_DIM, VALUE_PADDED, BLOCK, HAS_SOFTCAP,
    )  # fmt: skip
    if HAS_SINKS:
        sink = tl.load(sinks + first_head + heads, mask=is_head, other=0.0).to(tl.float32)
        new_top = tl.maximum(top, sink)
        total = total * tl.exp(top - new_top) + tl.exp(sink - new_top)
        mix = mix * tl.exp(top - new_top)[:, None]
    mix = mix / total[:, None]
    place_of = (row * HEADS * tl.num_programs(1) + first_head + heads[:, None]) * VALUE_DIM
    tl.store(
        output + place_of + v_dim[None, :],
        mix.to(output.dtype.element_ty),
        mask=is_head[:, None] & is_v[None, :],
    )

"""The backward pass of packed attention with shared prompts. Triton.

With s the scores, L the log-sum-exp over all keys of a query and o its output, the weights are
p = exp(s - L) whatever keys are looked at, so every (query, key) pair can be treated alone:

    d = sum(do o)   ds = p (do v - d)   dq = scale sum ds k   dk = scale sum ds q   dv = sum p do

Two kernels, each computing p anew. The first takes the pieces of the forward pass and adds up dq
over keys. The second takes `KEYS` keys and some of the queries that see them. A token sees those
that stand before it: prompts are laid out before their samples, so "query at or after key" says so
in both kernels. Keys of a prompt are seen by many; their queries are cut into `PROMPT_PIECES`, and
the sums of the pieces are added in their order. No number depends on which program runs first.
"""

# Types do not know `kernel[grid](...)`.
# pyright: reportIndexIssue=false

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from verl.models.kernels.attention_blocks import (
    BLOCK,
    LOG2_E,
    SMALLEST_DOT,
    load_block,
)
from verl.models.kernels.availability import has_large_shared_memory
from verl.models.kernels.packed_attention import Tiles, launch_options, tokens_per_tile
from verl.utils.device import without_waiting

KEYS = 64
"""Keys of a program of the second kernel."""

QUERIES, QUERIES_OF_WIDE_HEADS = 64, 32
"""Queries that it looks at together: as many tokens as fit, times the query heads of a KV head."""

WIDE = 64
"""Heads above this width leave registers for fewer queries."""

PROMPT_PIECES = 4
WIDEST_HEAD = 128
THREADS_FOR_KEYS, NUM_STAGES_FOR_KEYS = 128, 3
"""Small programs: with twice the keys and threads only one fits on a multiprocessor, and waits."""


@dataclass(frozen=True)
class KeySpan:
    """Keys [start, end) and the tokens whose queries see them: those from `start` on up to `end`,
    and for a prompt also the tokens of its samples."""

    start: int
    end: int
    samples: tuple[int, int] | None = None


class KeyTiles:
    """What each program of the second kernel does; int32 columns on the device."""

    def __init__(self, spans: Sequence[KeySpan], device: torch.device) -> None:
        """Spans of prompts come first, and their keys are the first tokens of the pass."""
        rows: list[tuple[int, int, int, int, int]] = []
        self.num_prompt_tokens = max((s.end for s in spans if s.samples is not None), default=0)
        for span in spans:
            for start in range(span.start, span.end, KEYS):
                end = min(start + KEYS, span.end)
                if span.samples is None:
                    rows.append((start, end, start, span.end, -1))
                else:
                    rows.append((start, end, start, span.end, 0))
                    rows += [
                        (start, end, first, last, 1 + piece)
                        for piece, (first, last) in enumerate(pieces(*span.samples))
                    ]
        rows.sort(key=lambda row: row[2] - row[3])  # long ones first, so that none is left at last
        table = torch.tensor(rows, dtype=torch.int32).view(-1, 5).t().contiguous()
        self.columns = without_waiting(table, device)  # (5, programs)


def pieces(first: int, last: int) -> list[tuple[int, int]]:
    """[first, last) in `PROMPT_PIECES` parts; some are empty when there is little."""
    size = -(-(last - first) // PROMPT_PIECES)
    starts = [min(first + size * piece, last) for piece in range(PROMPT_PIECES + 1)]
    return list(pairwise(starts))


def packed_attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log_sum: Tensor,
    tiles: Tiles,
    key_tiles: KeyTiles,
    *,
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query (N, heads, D), key and value (N, KV heads, D).

    `output` and `log_sum` (heads, N) are those of `packed_attention` for the same `tiles`, without
    window, soft cap and sinks. Tokens of no sequence get zeros.
    """
    tensors = (gradient, query, key, value, output)
    gradient, query, key, value, output = (
        x if x.stride(-1) == 1 else x.contiguous() for x in tensors
    )
    num_tokens, num_heads, dim = query.shape
    heads = num_heads // key.shape[1]
    padded = max(SMALLEST_DOT, triton.next_power_of_2(dim))
    shape = {"HEADS": heads, "DIM": dim, "PADDED": padded}
    make = torch.zeros if tiles.num_tokens < num_tokens else torch.empty
    grad_query = make(query.shape, dtype=query.dtype, device=query.device)
    grads = make((2, *key.shape), dtype=key.dtype, device=key.device)  # of key and value
    tile = query_tile(heads, dim)
    statistics = log_sum.new_empty(key.shape[1], num_tokens, heads, tile["NUMBERS"])
    tokens = tokens_per_tile(query, key)
    num_rows = max(SMALLEST_DOT, triton.next_power_of_2(tokens * heads))
    _query_gradient[(tiles.columns.shape[1], key.shape[1])](
        gradient, query, key, value, output, log_sum, statistics, grad_query,
        *tiles.columns, scaling, num_tokens,
        *(step for x in (gradient, query, key, value, output) for step in x.stride()[:2]),
        TOKENS=tokens,
        ROWS=num_rows,
        BLOCK=BLOCK,
        NUMBERS=tile["NUMBERS"],
        **launch_options(query, num_rows),
        **shape,
    )  # fmt: skip
    _write_key_gradients(
        grads, gradient, query, key, value, statistics, key_tiles,
        scaling=scaling, shape=shape | tile,
    )  # fmt: skip
    return grad_query, grads[0], grads[1]


def query_tile(heads: int, dim: int) -> dict[str, int]:
    """Queries that the second kernel looks at together, of how many tokens, with how many numbers.

    Two numbers are known of each query: its negative log-sum-exp, in units of ln 2, and d. With as
    many in a tile as there are threads, Triton lets each thread load one; of fewer, each thread
    loads all that it needs.
    """
    rows = max(QUERIES if dim <= WIDE else QUERIES_OF_WIDE_HEADS, triton.next_power_of_2(heads))
    return {"ROWS": rows, "TOKENS": rows // heads, "NUMBERS": max(2, THREADS_FOR_KEYS // rows)}


def _write_key_gradients(
    grads: Tensor,
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    statistics: Tensor,
    key_tiles: KeyTiles,
    *,
    scaling: float,
    shape: dict[str, int],
) -> None:
    """Fill `grads` (2, N, KV heads, D), those of key and value.

    `statistics` (KV heads, N, heads of a KV head, numbers) are those of `_query_gradient`, so that
    what a tile needs stands side by side; `shape` is what the kernel is compiled for.
    """
    num_prompt_tokens = key_tiles.num_prompt_tokens
    is_usual = shape["ROWS"] * shape["PADDED"] <= QUERIES * WIDEST_HEAD
    fits = is_usual and has_large_shared_memory(key.device)
    parts = grads.new_empty(
        2, 1 + PROMPT_PIECES, num_prompt_tokens, *key.shape[1:], dtype=torch.float32
    )
    _key_gradients[(key_tiles.columns.shape[1], key.shape[1])](
        gradient, query, key, value, statistics, *grads, *parts,
        *key_tiles.columns, scaling, len(query), num_prompt_tokens,
        *(step for x in (gradient, query, key, value) for step in x.stride()[:2]),
        KEYS=KEYS,
        num_warps=THREADS_FOR_KEYS // 32,
        num_stages=NUM_STAGES_FOR_KEYS if fits else 1,
        **shape,
    )  # fmt: skip
    if num_prompt_tokens:
        grads[:, :num_prompt_tokens] = parts.sum(1)


@triton.jit
def _query_gradient(
    gradient, query, key, value, output, log_sums, statistics, grad_query,
    offsets, starts, lengths, shared_starts, num_shareds, scale, num_tokens,
    g_token, g_head, q_token, q_head, k_token, k_head, v_token, v_head, o_token, o_head,
    HEADS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    offset, start = tl.load(offsets + tile), tl.load(starts + tile).to(tl.int64)
    length, num_shared = tl.load(lengths + tile), tl.load(num_shareds + tile)
    shared_start = tl.load(shared_starts + tile).to(tl.int64)

    rows, dim = tl.arange(0, ROWS), tl.arange(0, PADDED)
    index, head = offset + rows // HEADS, kv_head * HEADS + rows % HEADS
    is_query = (rows < TOKENS * HEADS) & (index < length)
    token = start + index
    mask = is_query[:, None] & (dim < DIM)[None, :]
    q = tl.load(query + (token * q_token + head * q_head)[:, None] + dim[None, :], mask, 0.0)
    g = tl.load(gradient + (token * g_token + head * g_head)[:, None] + dim[None, :], mask, 0.0)
    o = tl.load(output + (token * o_token + head * o_head)[:, None] + dim[None, :], mask, 0.0)
    delta = tl.sum(g.to(tl.float32) * o.to(tl.float32), 1)
    log_sum = tl.load(log_sums + head * num_tokens + token, mask=is_query, other=float("inf"))
    log_sum *= LOG2_E
    numbers = ((kv_head.to(tl.int64) * num_tokens + start + offset) * HEADS + rows) * NUMBERS
    tl.store(statistics + numbers, -log_sum, mask=is_query)
    tl.store(statistics + numbers + NUMBERS // 2, delta, mask=is_query)

    shared_keys = key + shared_start * k_token + kv_head * k_head
    shared_values = value + shared_start * v_token + kv_head * v_head
    jump = (start - shared_start).to(tl.int32) - num_shared
    accumulator = tl.zeros([ROWS, PADDED], tl.float32)
    end = num_shared + tl.minimum(offset + TOKENS, length)
    factor = scale * LOG2_E
    # Every query sees the blocks before that of the first one.
    start_masked = (num_shared + offset + 1) // BLOCK * BLOCK
    for first in range(0, start_masked, BLOCK):
        accumulator = _see_keys(
            accumulator, q, g, log_sum, delta, num_shared + index, first, end, num_shared, jump,
            factor,
            shared_keys, shared_values, k_token, v_token, DIM, PADDED, BLOCK, False,
        )  # fmt: skip
    # Few blocks, and deeper pipelining would take registers from the loop above.
    for first in tl.range(start_masked, end, BLOCK, num_stages=2):
        accumulator = _see_keys(
            accumulator, q, g, log_sum, delta, num_shared + index, first, end, num_shared, jump,
            factor,
            shared_keys, shared_values, k_token, v_token, DIM, PADDED, BLOCK, True,
        )  # fmt: skip
    number = (token * HEADS * tl.num_programs(1) + head) * DIM
    result = (accumulator * scale).to(grad_query.dtype.element_ty)
    tl.store(grad_query + number[:, None] + dim[None, :], result, mask=mask)


@triton.jit
def _see_keys(
    accumulator, q, g, log_sum, delta, positions, first, end, split, jump, factor,
    keys, values, k_token, v_token,
    DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """The gradient of some queries after one more block of keys, still without the scale."""
    tokens = first + tl.arange(0, BLOCK)
    k = load_block(tokens, end, split, jump, keys, k_token, keys, k_token, DIM, PADDED, IS_MASKED)
    v = load_block(
        tokens, end, split, jump, values, v_token, values, v_token, DIM, PADDED, IS_MASKED
    )
    x = tl.dot(q, tl.trans(k), input_precision="ieee")
    p = tl.exp2(tl.fma(x, factor, -log_sum[:, None]))
    if IS_MASKED:
        p = tl.where(tokens[None, :] <= positions[:, None], p, 0.0)
    ds = p * (tl.dot(g, tl.trans(v), input_precision="ieee") - delta[:, None])
    return tl.dot(ds.to(k.dtype), k, accumulator, input_precision="ieee")


@triton.jit
def _key_gradients(
    gradient, query, key, value, statistics, grad_key, grad_value, key_parts, value_parts,
    key_starts, key_ends, query_starts, query_ends, piece_indices, scale,
    num_tokens, num_prompt_tokens,
    g_token, g_head, q_token, q_head, k_token, k_head, v_token, v_head,
    HEADS: tl.constexpr, KEYS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    DIM: tl.constexpr, PADDED: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    key_end, query_end = tl.load(key_ends + tile), tl.load(query_ends + tile)
    query_start, piece = tl.load(query_starts + tile), tl.load(piece_indices + tile)
    tokens = tl.load(key_starts + tile) + tl.arange(0, KEYS)
    dim = tl.arange(0, PADDED)
    mask = (tokens < key_end)[:, None] & (dim < DIM)[None, :]
    long_tokens = tokens.to(tl.int64)[:, None]
    k = tl.load(key + long_tokens * k_token + kv_head * k_head + dim[None, :], mask, 0.0)
    v = tl.load(value + long_tokens * v_token + kv_head * v_head + dim[None, :], mask, 0.0)
    grad_k = tl.zeros([KEYS, PADDED], tl.float32)
    grad_v = tl.zeros([KEYS, PADDED], tl.float32)

    first_query = query_start.to(tl.int64)
    query += first_query * q_token + kv_head * HEADS * q_head
    gradient += first_query * g_token + kv_head * HEADS * g_head
    statistics += (kv_head.to(tl.int64) * num_tokens + first_query) * HEADS * NUMBERS
    # Queries behind all of the keys see all of them: only tiles with others, and one that is not
    # full, need a mask.
    num_queries = query_end - query_start
    num_early = tl.cdiv(tl.minimum(tl.maximum(key_end - query_start, 0), num_queries), TOKENS)
    num_full, num_tiles = num_queries // TOKENS, tl.cdiv(num_queries, TOKENS)
    factor = scale * LOG2_E
    for number in range(num_early, num_full):
        grad_k, grad_v = _see_queries(
            grad_k, grad_v, k, v, tokens, number * TOKENS, query_start, num_queries, factor,
            gradient, query, statistics, g_token, g_head, q_token, q_head,
            HEADS, TOKENS, ROWS, DIM, PADDED, NUMBERS, False,
        )  # fmt: skip
    for masked in range(num_early + num_tiles - tl.maximum(num_full, num_early)):
        number = tl.where(masked < num_early, masked, num_full)
        grad_k, grad_v = _see_queries(
            grad_k, grad_v, k, v, tokens, number * TOKENS, query_start, num_queries, factor,
            gradient, query, statistics, g_token, g_head, q_token, q_head,
            HEADS, TOKENS, ROWS, DIM, PADDED, NUMBERS, True,
        )  # fmt: skip
    grad_k *= scale
    kv_heads = tl.num_programs(1)
    if piece < 0:
        target = (long_tokens * kv_heads + kv_head) * DIM + dim[None, :]
        tl.store(grad_key + target, grad_k.to(grad_key.dtype.element_ty), mask=mask)
        tl.store(grad_value + target, grad_v.to(grad_value.dtype.element_ty), mask=mask)
    else:
        piece_start = piece.to(tl.int64) * num_prompt_tokens
        target = ((piece_start + long_tokens) * kv_heads + kv_head) * DIM + dim[None, :]
        tl.store(key_parts + target, grad_k, mask=mask)
        tl.store(value_parts + target, grad_v, mask=mask)


@triton.jit
def _see_queries(
    grad_k, grad_v, k, v, tokens, first, query_start, num_queries, factor,
    gradient, query, statistics, g_token, g_head, q_token, q_head,
    HEADS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    DIM: tl.constexpr, PADDED: tl.constexpr, NUMBERS: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """The gradients of a tile of keys and values after the queries of `TOKENS` more tokens.

    Where these are in memory, relative to `first`, is the same for all tiles.
    """
    rows, dim = tl.arange(0, ROWS), tl.arange(0, PADDED)
    is_query = rows < TOKENS * HEADS
    if IS_MASKED:
        is_query = rows < tl.minimum(num_queries - first, TOKENS) * HEADS
    mask = is_query[:, None] & (dim < DIM)[None, :]
    long = tl.cast(first, tl.int64)
    token, head = rows // HEADS, rows % HEADS
    q_offsets = (token * q_token + head * q_head)[:, None] + dim[None, :]
    g_offsets = (token * g_token + head * g_head)[:, None] + dim[None, :]
    # Where there is no query, q, g and delta are 0 and add nothing.
    q = tl.load(query + long * q_token + q_offsets, mask, 0.0)
    g = tl.load(gradient + long * g_token + g_offsets, mask, 0.0)
    numbers = rows[:, None] * NUMBERS + tl.arange(0, NUMBERS)[None, :]
    both = tl.load(statistics + long * HEADS * NUMBERS + numbers, is_query[:, None], 0.0)
    if NUMBERS == 4:
        both, _ = tl.split(tl.reshape(both, [ROWS, 2, 2]))
    minus_log_sum, delta = tl.split(both)
    x = tl.dot(k, tl.trans(q), input_precision="ieee")
    # Two products after each other keep the tensor cores busy for longer.
    dp = tl.dot(v, tl.trans(g), input_precision="ieee")
    p = tl.exp2(tl.fma(x, factor, minus_log_sum[None, :]))
    if IS_MASKED:  # "key at or before query", without dividing rows by heads
        first_row = (tokens - query_start - first) * HEADS
        p = tl.where(first_row[:, None] <= rows[None, :], p, 0.0)
    grad_v = tl.dot(p.to(g.dtype), g, grad_v, input_precision="ieee")
    ds = p * (dp - delta[None, :])
    grad_k = tl.dot(ds.to(q.dtype), q, grad_k, input_precision="ieee")
    return grad_k, grad_v

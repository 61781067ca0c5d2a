"""Causal attention over sequences end to end, some of which continue a shared prompt. Triton.

    tokens    [ prompt A | prompt B | A's answer 1 | A's answer 2 | B's answer 1 | ... ]

A program takes one KV head and a few consecutive tokens of one sequence, with all query heads of
that head. It goes over the prompt that the sequence continues, if there is one, and over the
sequence's own tokens: what decoding does for one token, by the same loop and with the same bits.
The backward pass is in `packed_attention_backward`.
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
    LN_2,
    SMALLEST_DOT,
    attend,
    initial_state,
    with_sink,
)
from verl.models.kernels.availability import (
    has_large_shared_memory,
    rows_that_fit,
    stages_that_fit,
)
from verl.utils.device import without_waiting

ROWS, ROWS_OF_WIDE_HEADS = 128, 64
"""Queries of a program: as many tokens as fit, times the query heads of a KV head."""

NUM_STAGES, NUM_STAGES_OF_WIDE_HEADS = 3, 2
"""Blocks on their way."""

WIDE = 256
"""Bytes of a head; wider ones leave room for fewer queries and blocks."""

ROWS_PER_WARP, FEWEST_WARPS = 16, 4
NARROW, REGISTERS_OF_NARROW_HEADS = 128, 128
"""Two programs share a multiprocessor if heads have so few bytes and threads so few registers."""


@dataclass(frozen=True)
class Continuation:
    """A sequence of a pass: `length` tokens from `start` on, after `num_shared` others.

    Those stand from `shared_start` on among the keys of the pass, or of the tensors handed over
    beside them.
    """

    start: int
    length: int
    shared_start: int = 0
    num_shared: int = 0


class Tiles:
    """The sequences cut into pieces, one program each; int32 columns on the device."""

    def __init__(
        self, sequences: Sequence[Continuation], num_tokens: int, device: torch.device
    ) -> None:
        """`num_tokens` are the tokens of a piece."""
        table = np.array(
            [(s.start, s.length, s.shared_start, s.num_shared) for s in sequences], dtype=np.int32
        ).reshape(-1, 4)
        columns = tile_columns(table, num_tokens)
        self.columns = without_waiting(torch.from_numpy(columns), device)  # (5, pieces)
        self.num_tokens = int(table[:, 1].sum())


def tile_columns(table: np.ndarray, num_tokens: int) -> np.ndarray:
    """Pieces of `num_tokens` tokens of the sequences that are lines of `table` int32, whose lengths
    are its second column: the first token of each, and the columns of its sequence."""
    counts = -(-table[:, 1] // num_tokens)
    sequence = np.arange(len(table)).repeat(counts)
    # A sequence's last piece sees most keys; it comes first, so that none waits for it at last.
    piece = counts.cumsum()[sequence] - 1 - np.arange(len(sequence))
    return np.stack([(piece * num_tokens).astype(np.int32), *table[sequence].T])


def tokens_per_tile(query: Tensor, key: Tensor) -> int:
    """Tokens of one program, for queries (N, heads, D) and keys (any number, KV heads, ...)."""
    return max(1, num_queries(query) // (query.shape[1] // key.shape[1]))


def launch_options(query: Tensor, num_rows: int) -> dict[str, int]:
    """For programs of `num_rows` queries that go over blocks of keys."""
    width = _width(query)
    num_stages = NUM_STAGES if width <= WIDE else NUM_STAGES_OF_WIDE_HEADS
    if _is_crowded(query):
        num_stages = 1
    options = {
        "num_warps": max(FEWEST_WARPS, num_rows // ROWS_PER_WARP),
        "num_stages": stages_that_fit(num_stages, query, num_rows, num_keys=BLOCK),
    }
    return options | {"maxnreg": REGISTERS_OF_NARROW_HEADS} if width <= NARROW else options


def num_queries(query: Tensor) -> int:
    """Of a program: tokens times query heads of a KV head."""
    fits = _width(query) <= WIDE and not _is_crowded(query)
    num_rows = ROWS if fits else ROWS_OF_WIDE_HEADS
    return rows_that_fit(num_rows, query, num_keys=BLOCK)


def _is_crowded(query: Tensor) -> bool:
    """Whether the device has too little shared memory for several blocks of such heads."""
    return _width(query) > NARROW and not has_large_shared_memory(query.device)


def _width(query: Tensor) -> int:
    return query.shape[-1] * query.element_size()


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tiles: Tiles,
    *,
    shared: tuple[Tensor, Tensor] | None = None,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs (N, heads, value dim) and the log-sum-exp of each query's scores (heads, N), fp32.

    Queries are (N, heads, D), keys and values (N, KV heads, D). Tokens of no sequence get zeros.
    """
    (num_tokens, num_heads, key_dim), (num_kv_heads, value_dim) = query.shape, value.shape[1:]
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    shared_key, shared_value = (key, value) if shared is None else shared
    output = query.new_empty(num_tokens, num_heads, value_dim)
    if tiles.num_tokens < num_tokens:
        output.zero_()
    log_sum = torch.zeros(num_heads, num_tokens, dtype=torch.float32, device=query.device)
    heads = num_heads // num_kv_heads
    num_rows = max(num_queries(query), triton.next_power_of_2(heads))
    _packed_attention[(tiles.columns.shape[1], num_kv_heads)](
        query, key, value, shared_key, shared_value, output, log_sum,
        *tiles.columns, query if sinks is None else sinks, scaling, softcap or 0.0, num_tokens,
        *query.stride()[:2], *key.stride()[:2], *value.stride()[:2],
        *shared_key.stride()[:2], *shared_value.stride()[:2],
        HEADS=heads,
        TOKENS=tokens_per_tile(query, key),
        ROWS=num_rows,
        KEY_DIM=key_dim,
        KEY_PADDED=max(SMALLEST_DOT, triton.next_power_of_2(key_dim)),
        VALUE_DIM=value_dim,
        VALUE_PADDED=max(SMALLEST_DOT, triton.next_power_of_2(value_dim)),
        BLOCK=BLOCK,
        WINDOW=sliding_window or 0,
        HAS_SOFTCAP=softcap is not None,
        HAS_SINKS=sinks is not None,
        IS_APART=shared is not None,
        **launch_options(query, num_rows),
        **LAUNCH,
    )  # fmt: skip
    return output, log_sum


@triton.jit
def _packed_attention(
    query, key, value, shared_key, shared_value, output, log_sums,
    offsets, starts, lengths, shared_starts, num_shareds, sinks, scale, softcap, num_tokens,
    q_token, q_head, k_token, k_head, v_token, v_head, sk_token, sk_head, sv_token, sv_head,
    HEADS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    KEY_DIM: tl.constexpr, KEY_PADDED: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_PADDED: tl.constexpr,
    BLOCK: tl.constexpr, WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, IS_APART: tl.constexpr,
):  # fmt: skip
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    offset, start = tl.load(offsets + tile), tl.load(starts + tile).to(tl.int64)
    length, num_shared = tl.load(lengths + tile), tl.load(num_shareds + tile)
    shared_start = tl.load(shared_starts + tile).to(tl.int64)

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
    first = offset * 0
    if WINDOW > 0:
        first = tl.maximum(num_shared + offset - WINDOW + 1, 0)
    jump = None
    if not IS_APART:
        jump = (start - shared_start).to(tl.int32) - num_shared
    max_score, denominator, accumulator = initial_state(ROWS, VALUE_PADDED)
    max_score, denominator, accumulator = attend(
        max_score, denominator, accumulator, q, num_shared + index,
        first, num_shared + tl.minimum(offset + TOKENS, length), num_shared, jump, scale, softcap,
        shared_key + shared_start * sk_token + kv_head * sk_head,
        shared_value + shared_start * sv_token + kv_head * sv_head, sk_token, sv_token,
        key + start * k_token + kv_head * k_head,
        value + start * v_token + kv_head * v_head, k_token, v_token,
        KEY_DIM, KEY_PADDED, VALUE_DIM, VALUE_PADDED, BLOCK, WINDOW, HAS_SOFTCAP, True,
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
    tl.store(
        log_sums + head * num_tokens + token,
        (max_score + tl.log2(denominator)) * LN_2,
        mask=is_query,
    )

"""The inner loop that all attention kernels share: some queries over the keys of one sequence.

A sequence's tokens have positions 0, 1, 2, ...; those before `split` are kept in one place (a
prompt that several sequences share), the rest in another. Keys are visited in blocks that begin at
multiples of `BLOCK`, whoever asks and wherever the keys are. Sums over keys run inside matrix
instructions, a row of which does not depend on the other rows. A query therefore gets the same bits
alone, among the tokens of a training pass, or behind a shared prompt.
"""

import triton
import triton.language as tl

BLOCK = 64
"""Keys that are visited together."""

SMALLEST_DOT = 16
"""Rows and columns that a matrix instruction takes at least."""

LOWEST = tl.constexpr(-1e30)
"""Below every score, and still finite: a block of which a query sees nothing leaves it alone."""


@triton.jit
def scores(q, k, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Scaled products of the queries with a block of keys, (rows, keys) in fp32."""
    x = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if HAS_SOFTCAP:
        x = softcap * (2 * tl.sigmoid(2 * x / softcap) - 1)  # tanh
    return x


@triton.jit
def visit(
    q, positions, first, end, split, scale, softcap,
    shared_keys, shared_values, shared_key_step, shared_value_step,
    own_keys, own_values, own_key_step, own_value_step,
    ROWS: tl.constexpr, KEY_DIM: tl.constexpr, KEY_PADDED: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_PADDED: tl.constexpr,
    BLOCK: tl.constexpr, WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Largest score (rows,), sum of weights (rows,) and weighted values (rows, value dim).

    Queries (rows, key dim) stand at `positions` and see themselves and what is before, with a
    window only the nearest; what lies outside [first, end) is seen by none of them.
    """
    k_dim, v_dim = tl.arange(0, KEY_PADDED), tl.arange(0, VALUE_PADDED)
    top = tl.full([ROWS], LOWEST, tl.float32)
    # One sum, in all columns: a reduction outside the instruction would add in another order for
    # another number of rows.
    total = tl.zeros([ROWS, 16], tl.float32)
    mix = tl.zeros([ROWS, VALUE_PADDED], tl.float32)
    for start in range(first // BLOCK * BLOCK, end, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        is_kept, is_shared = tokens < end, tokens < split
        k_token = tl.where(
            is_shared,
            shared_keys + tokens * shared_key_step,
            own_keys + (tokens - split) * own_key_step,
        )
        k = tl.load(
            k_token[:, None] + k_dim[None, :],
            mask=is_kept[:, None] & (k_dim < KEY_DIM)[None, :],
            other=0.0,
        )
        x = scores(q, k, scale, softcap, HAS_SOFTCAP)
        is_seen = tokens[None, :] <= positions[:, None]
        if WINDOW > 0:
            is_seen = is_seen & (tokens[None, :] > positions[:, None] - WINDOW)
        x = tl.where(is_seen, x, float("-inf"))
        new_top = tl.maximum(top, tl.max(x, 1))
        shrink = tl.exp(top - new_top)[:, None]
        v_token = tl.where(
            is_shared,
            shared_values + tokens * shared_value_step,
            own_values + (tokens - split) * own_value_step,
        )
        v = tl.load(
            v_token[:, None] + v_dim[None, :],
            mask=is_kept[:, None] & (v_dim < VALUE_DIM)[None, :],
            other=0.0,
        )
        p = tl.exp(x - new_top[:, None]).to(v.dtype)
        ones = tl.full([BLOCK, 16], 1.0, v.dtype)
        total = tl.dot(p, ones, total * shrink, input_precision="ieee")
        mix = tl.dot(p, v, mix * shrink, input_precision="ieee")
        top = new_top
    return top, tl.max(total, 1), mix


@triton.jit
def with_sink(top, total, mix, sink):
    """A score per row that takes part in the softmax and carries no value."""
    new_top = tl.maximum(top, sink)
    total = total * tl.exp(top - new_top) + tl.exp(sink - new_top)
    return new_top, total, mix * tl.exp(top - new_top)[:, None]

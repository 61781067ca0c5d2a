"""The inner loop that all attention kernels share: some queries over the keys of one sequence.

A sequence's tokens have positions 0, 1, 2, ...; those before `split` are kept in one place (a
prompt that several sequences share), the rest in another. Keys are taken in blocks that begin at
multiples of `BLOCK`, whoever asks and wherever the keys are. Sums over keys run inside matrix
instructions, a row of which does not depend on the other rows. A query therefore gets the same bits
alone, among the tokens of a training pass, or behind a shared prompt. Where memory is cut into
pages, a page holds one block: the page of the tokens from `start` on is `pages[start / BLOCK]`, and
there is nothing to split.
"""

import triton
import triton.language as tl

BLOCK = 64
"""Keys of one block of the loop over keys."""

SMALLEST_DOT = 16
"""Rows and columns that a matrix instruction takes at least."""

LOWEST = tl.constexpr(-1e30)
"""Below every score, and still finite: a block of which a query sees nothing leaves it alone."""

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)

LAUNCH = {"enable_fp_fusion": False}
"""Fused multiply-adds would be the compiler's choice, another one in each kernel; the one that
pays is written down."""


def stages_of_pages(num_stages: int, key_dim: int) -> int:
    """As many blocks are then on their way as with `num_stages` where there are no pages.

    The number of a page must be there before the page can be fetched, and takes as many stages.
    Wide heads do better with fewer blocks at once, which leave room for more programs.
    """
    return 2 * num_stages - 1 if key_dim <= 64 else num_stages


@triton.jit
def initial_state(ROWS: tl.constexpr, VALUE_PADDED: tl.constexpr):
    """Max score, denominator and accumulator of queries that have seen no key yet."""
    max_score = tl.full([ROWS], LOWEST, tl.float32)
    return max_score, tl.zeros([ROWS, 16], tl.float32), tl.zeros([ROWS, VALUE_PADDED], tl.float32)


@triton.jit
def attend(
    max_score, denominator, accumulator, q, positions, first, end, split, jump, scale, softcap,
    shared_keys, shared_values, shared_key_step, shared_value_step,
    own_keys, own_values, own_key_step, own_value_step,
    KEY_DIM: tl.constexpr, KEY_PADDED: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_PADDED: tl.constexpr,
    BLOCK: tl.constexpr, WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    SKIPS_MASKS: tl.constexpr, ONE_STEP: tl.constexpr = False,
    pages=0, key_page=0, value_page=0, PAGED: tl.constexpr = False,
):  # fmt: skip
    """Largest score (rows,), sum of weights (rows, 16) and weighted values (rows, value dim).

    They are handed in as they were before the first key of these. The sum stands in all columns: a
    reduction outside the matrix instruction would add in another order for another number of rows.

    Queries (rows, key dim) stand at `positions`, ascending, and see themselves and what is before,
    with a window only the nearest; what lies outside [first, end) is seen by none of them. Scores
    are in units of ln 2. With `SKIPS_MASKS` blocks that every query sees are not masked, which
    changes no number. With `ONE_STEP` both stores have the step of the second. If `PAGED`,
    `shared_keys` and `shared_values` are those of page 0, and `key_page` and `value_page` lead from
    one page to the next.
    """
    start_masked = first // BLOCK * BLOCK
    if SKIPS_MASKS and WINDOW == 0:
        start_masked = (tl.min(positions, 0) + 1) // BLOCK * BLOCK
        for start in range(first // BLOCK * BLOCK, start_masked, BLOCK):
            max_score, denominator, accumulator = attend_block(
                q, positions, start, end, split, jump, scale, softcap,
                max_score, denominator, accumulator,
                shared_keys, shared_values, shared_key_step, shared_value_step,
                own_keys, own_values, own_key_step, own_value_step,
                KEY_DIM, KEY_PADDED, VALUE_DIM, VALUE_PADDED, BLOCK, WINDOW, HAS_SOFTCAP, False,
                ONE_STEP, pages, key_page, value_page, PAGED,
            )  # fmt: skip
    for start in range(start_masked, end, BLOCK):
        max_score, denominator, accumulator = attend_block(
            q, positions, start, end, split, jump, scale, softcap,
            max_score, denominator, accumulator,
            shared_keys, shared_values, shared_key_step, shared_value_step,
            own_keys, own_values, own_key_step, own_value_step,
            KEY_DIM, KEY_PADDED, VALUE_DIM, VALUE_PADDED, BLOCK, WINDOW, HAS_SOFTCAP, True,
            ONE_STEP, pages, key_page, value_page, PAGED,
        )  # fmt: skip
    return max_score, denominator, accumulator


@triton.jit
def attend_block(
    q, positions, start, end, split, jump, scale, softcap, max_score, denominator, accumulator,
    shared_keys, shared_values, shared_key_step, shared_value_step,
    own_keys, own_values, own_key_step, own_value_step,
    KEY_DIM: tl.constexpr, KEY_PADDED: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_PADDED: tl.constexpr,
    BLOCK: tl.constexpr, WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, IS_MASKED: tl.constexpr,
    ONE_STEP: tl.constexpr, pages, key_page, value_page, PAGED: tl.constexpr,
):  # fmt: skip
    """`max_score`, `denominator` and `accumulator` after one more block of keys."""
    tokens = start + tl.arange(0, BLOCK)
    numbers, last = tokens, end
    if PAGED:
        numbers, last = tl.arange(0, BLOCK), end - start  # of the page's tokens
        page = tl.load(pages + start // BLOCK).to(tl.int64)
        shared_keys += page * key_page
        shared_values += page * value_page
    k = load_block(
        numbers, last, split, jump, shared_keys, shared_key_step, own_keys, own_key_step,
        KEY_DIM, KEY_PADDED, IS_MASKED, ONE_STEP, PAGED,
    ).to(q.dtype)  # fmt: skip
    x = tl.dot(q, tl.trans(k), input_precision="ieee")
    factor = scale * LOG2_E
    if HAS_SOFTCAP:
        x = softcap * (2 * tl.sigmoid(2 * (x * scale) / softcap) - 1)  # tanh
        factor = LOG2_E
    if IS_MASKED:
        is_seen = tokens[None, :] <= positions[:, None]
        if WINDOW > 0:
            is_seen = is_seen & (tokens[None, :] > positions[:, None] - WINDOW)
        x = tl.where(is_seen, x, float("-inf"))
    new_max = tl.maximum(max_score, tl.max(x, 1) * factor)
    shrink = tl.exp2(max_score - new_max)[:, None]
    v = load_block(
        numbers, last, split, jump, shared_values, shared_value_step, own_values, own_value_step,
        VALUE_DIM, VALUE_PADDED, IS_MASKED, ONE_STEP, PAGED,
    ).to(q.dtype)  # fmt: skip
    p = tl.exp2(tl.fma(x, factor, -new_max[:, None])).to(v.dtype)
    ones = tl.full([BLOCK, 16], 1.0, v.dtype)
    denominator = tl.dot(p, ones, denominator * shrink, input_precision="ieee")
    accumulator = tl.dot(p, v, accumulator * shrink, input_precision="ieee")
    return new_max, denominator, accumulator


@triton.jit
def load_block(
    tokens, end, split, jump, shared, shared_step, own, own_step,
    DIM: tl.constexpr, PADDED: tl.constexpr, IS_MASKED: tl.constexpr,
    ONE_STEP: tl.constexpr = False, ARE_TOGETHER: tl.constexpr = False,
):  # fmt: skip
    """Keys or values of `tokens`, (tokens, padded dim); 0 at and behind `end`.

    With a `jump` both parts are in one tensor: the own tokens stand that many tokens further than
    right behind the shared ones. With `ONE_STEP` they have at least one step. If `ARE_TOGETHER`,
    all are found from `shared` on, wherever the split is. Each takes fewer instructions to find
    addresses than the general way.
    """
    dim = tl.arange(0, PADDED)
    if ARE_TOGETHER:
        pointers = shared + (tokens[:, None] * shared_step + dim[None, :])
    elif jump is not None:
        number = tokens + tl.where(tokens < split, 0, jump)
        pointers = (shared + number.to(tl.int64) * shared_step)[:, None] + dim[None, :]
    elif ONE_STEP:
        start = tl.where(tokens < split, shared, own - split * own_step)
        pointers = start[:, None] + (tokens[:, None] * own_step + dim[None, :])
    else:
        token = tl.where(
            tokens < split, shared + tokens * shared_step, own + (tokens - split) * own_step
        )
        pointers = token[:, None] + dim[None, :]
    if IS_MASKED:
        block = tl.load(pointers, mask=(tokens < end)[:, None] & (dim < DIM)[None, :], other=0.0)
    elif DIM == PADDED:
        block = tl.load(pointers)
    else:
        block = tl.load(pointers, mask=(dim < DIM)[None, :], other=0.0)
    return block


@triton.jit
def with_sink(max_score, denominator, accumulator, sink):
    """A score per row, in natural units, that takes part in the softmax and carries no value."""
    sink = sink * LOG2_E
    new_max = tl.maximum(max_score, sink)
    denominator = denominator * tl.exp2(max_score - new_max) + tl.exp2(sink - new_max)
    return new_max, denominator, accumulator * tl.exp2(max_score - new_max)[:, None]

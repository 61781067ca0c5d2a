"""The next token of each row from its logits, and its log-probability. Triton.

`log_probs` writes max and denominator of every block of a row. They give the log-sum-exp, bit for
bit that of training, and the block in which the row's uniform number falls, so that only that block
is read again. There is no sort, no noise tensor and no copy of the logits. The uniform number
is a hash of (seed, token index): what a row draws does not depend on its neighbours. Sums that
decide the draw are in fp64.

Filters and penalties (`filters`) change the statistics of the blocks and which tokens of the last
one count; the log-probability is that of the whole distribution, or of what they leave.
"""

# Types do not know `kernel[grid](...)`.
# pyright: reportIndexIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from verl.models.kernels.filters import (
    Filters,
    Repetition,
    Scores,
    choice_scores,
    kept_denominators,
    penalised_statistics,
    smallest_weights,
)
from verl.models.kernels.log_probs import (
    BLOCK,
    block_statistics,
    load_scores,
    log_sum_exp,
    row_statistics,
    score,
)

GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
FIRST_FACTOR = tl.constexpr(0xBF58476D1CE4E5B9)
SECOND_FACTOR = tl.constexpr(0x94D049BB133111EB)


def draw_tokens(
    logits: Tensor,
    temperature: Tensor,
    is_greedy: Tensor,
    seed: Tensor,
    token_index: Tensor,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    filters: Filters | None = None,
    repetition: Repetition | None = None,
    renormalizes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Token ids (B,) int64 and log-probabilities (B,) fp32 for raw logits (B, V).

    Scores are softcap(logits * scale) / temperature; greedy rows take the likeliest token. Rows
    whose filters and penalty are off get the token that they get without these arguments.
    Log-probabilities are those before filters and penalty, but for rows that `renormalizes` (B,).
    """
    whole = maxima, denominators = block_statistics(
        logits, temperature, scale=scale, softcap=softcap
    )
    scores = Scores(logits, temperature, scale, softcap, repetition)
    floors = temperature  # not read where there are no filters
    if repetition is not None:
        maxima, denominators = penalised_statistics(scores, maxima, denominators)
    if filters is not None:
        floors = smallest_weights(scores, filters, is_greedy, maxima, denominators)
        denominators = kept_denominators(scores, floors, maxima, denominators)
    tokens = torch.empty(scores.num_rows, dtype=torch.long, device=logits.device)
    log_probs = torch.empty(scores.num_rows, dtype=torch.float32, device=logits.device)
    _draw[(scores.num_rows,)](
        *scores.arguments, is_greedy, seed, token_index, *whole,
        maxima, denominators, floors, is_greedy if renormalizes is None else renormalizes,
        tokens, log_probs,
        BLOCK=BLOCK,
        HAS_FILTERS=filters is not None,
        RENORMALIZES=renormalizes is not None,
        **scores.options,
    )  # fmt: skip
    return tokens, log_probs


@triton.jit
def _scrambled(x):
    """SplitMix64's finalizer on uint64."""
    x = (x ^ (x >> 30)) * FIRST_FACTOR
    x = (x ^ (x >> 27)) * SECOND_FACTOR
    return x ^ (x >> 31)


@triton.jit
def _uniform(seed, index):
    """Uniform number in [0, 1) with 52 bits, as `verl.utils.scramble.uniform`."""
    golden = tl.full([], GOLDEN, tl.uint64)
    bits = _scrambled(_scrambled(seed.to(tl.uint64) + golden) + index.to(tl.uint64) * golden)
    return (bits >> 12).to(tl.float64) * 2.220446049250313e-16


@triton.jit
def _locate(weights, uniform, NUM: tl.constexpr):
    """Index of the weight that the point uniform x sum falls on, and where on it, in [0, 1).

    A weight of 0 is never chosen, whatever the sums are rounded to.
    """
    indices = tl.arange(0, NUM)
    ends = tl.cumsum(weights, 0)
    point = uniform * tl.sum(tl.where(indices == NUM - 1, ends, 0.0), 0)
    index = tl.min(tl.where((ends > point) & (weights > 0), indices, NUM), 0)
    index = tl.minimum(index, tl.max(tl.where(weights > 0, indices, 0), 0))
    weight = tl.sum(tl.where(indices == index, weights, 0.0), 0)
    end = tl.sum(tl.where(indices == index, ends, 0.0), 0)
    return index, tl.minimum(tl.maximum((point - end + weight) / weight, 0.0), 1 - 2.0**-52)


@triton.jit
def _draw(
    logits, seen, temperatures, penalties, row_step, seen_step, scale, softcap, num_blocks,
    are_greedy, seeds, indices, maxima, denominators,
    choice_maxima, choice_denominators, floors, renormalizes, tokens, log_probs,
    BLOCKS_PADDED: tl.constexpr, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_PENALTY: tl.constexpr, HAS_FILTERS: tl.constexpr,
    RENORMALIZES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    first = row * num_blocks
    row_max, _, parts = row_statistics(
        maxima + first, denominators + first, num_blocks, BLOCKS_PADDED
    )
    log_sum = log_sum_exp(row_max, parts)
    row_max, block_max, parts = row_statistics(
        choice_maxima + first, choice_denominators + first, num_blocks, BLOCKS_PADDED
    )
    block = tl.argmax(block_max, 0)
    is_greedy = tl.load(are_greedy + row)
    inside = tl.full([], 0.0, tl.float64)
    if is_greedy == 0:
        uniform = _uniform(tl.load(seeds + row), tl.load(indices + row))
        block, inside = _locate(parts.to(tl.float64), uniform, BLOCKS_PADDED)

    temperature = tl.load(temperatures + row)
    logits += row * row_step
    if HAS_PENALTY:
        x = choice_scores(
            logits, seen + row * seen_step, block, temperature,
            tl.load(penalties + row), scale, softcap,
            VOCABULARY, BLOCK, HAS_SOFTCAP, HAS_PENALTY,
        )  # fmt: skip
    else:
        x = load_scores(logits, block, temperature, scale, softcap, VOCABULARY, BLOCK, HAS_SOFTCAP)
    index = tl.argmax(x, 0)
    if is_greedy == 0:
        weights = tl.exp(x - tl.max(x, 0))
        if HAS_FILTERS:
            weights = tl.where(tl.exp(x - row_max) < tl.load(floors + row), 0.0, weights)
        index, inside = _locate(weights.to(tl.float64), inside, BLOCK)
    token = tl.minimum(block * BLOCK + index, VOCABULARY - 1)
    z = score(tl.load(logits + token), temperature, scale, softcap, HAS_SOFTCAP)
    log_prob = z - log_sum
    if RENORMALIZES:
        drawn = tl.sum(tl.where(tl.arange(0, BLOCK) == index, x, 0.0), 0)
        among_kept = drawn - log_sum_exp(row_max, parts)
        is_sound = log_prob == log_prob  # NaN must be seen
        does_apply = (tl.load(renormalizes + row) != 0) & is_sound
        log_prob = tl.where(does_apply, among_kept, log_prob)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(log_probs + row, log_prob)

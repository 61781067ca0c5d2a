"""Top-k, top-p, min-p and repetition penalties of many rows at once, without a sort. Triton.

A weight is exp(score - highest score), as in the plain sampler, and every filter is a smallest
weight. That of top-k is the smallest w with

    number of weights above w  <  k

and top-p has the same rule for their sum. Both sums fall as w grows, and the bits of a weight, read
as an integer, are in its order. So one program per row narrows an interval of bits: a pass over
the row tries three weights in it and sees which weights occur. Counts are exact. Sums are added up
in fp32 by lane and in fp64 across lanes, always in the same order. No row depends on another.

What comes out describes the distribution to draw from as `log_probs.block_statistics` describes the
whole one: max and denominator of every block. A row without filters has the same bits in both.
The draw itself is in `sampling`.
"""

# Types do not know `kernel[grid](...)`.
# pyright: reportIndexIssue=false

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from verl.models.kernels.log_probs import BLOCK, LAUNCH, capped, over_temperature, row_statistics

SEARCH_BLOCK, SEARCH_WARPS = 2048, 8
"""Weights of a row that the search looks at together: eight for each thread, so that what it keeps
of them stays in registers."""

ONE_BITS = tl.constexpr(0x3F800000)


@dataclass(frozen=True)
class Filters:
    """The filters of each row; tensors (rows,)."""

    top_k: Tensor
    """int64; off where it is 0 or as large as the vocabulary."""

    top_p: Tensor
    """fp64; off where it is 1."""

    min_p: Tensor
    """fp32; off where it is 0."""


@dataclass(frozen=True)
class Repetition:
    """Scores of seen tokens are divided by the penalty, or multiplied if negative."""

    penalty: Tensor
    """(rows,) in fp32; off where it is 1."""

    seen: Tensor
    """(rows, V), bool; read only where a penalty is on."""


@dataclass(frozen=True)
class Scores:
    """Scores to draw from: softcap(logits * scale), penalised, over the temperature."""

    logits: Tensor
    """(rows, V), raw; each row contiguous."""

    temperature: Tensor
    scale: float
    softcap: float | None
    repetition: Repetition | None

    @property
    def num_rows(self) -> int:
        return self.logits.shape[0]

    @property
    def num_blocks(self) -> int:
        return triton.cdiv(self.logits.shape[1], BLOCK)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The first arguments of the kernels that read scores."""
        repetition = self.repetition
        if repetition is None:  # neither of the two is read then
            repetition = Repetition(self.temperature, self.logits)
        else:
            repetition = Repetition(repetition.penalty, repetition.seen.view(torch.uint8))
        return (
            self.logits, repetition.seen, self.temperature, repetition.penalty,
            self.logits.stride(0), repetition.seen.stride(0),
            float(self.scale), float(self.softcap or 0), self.num_blocks,
        )  # fmt: skip

    @property
    def options(self) -> dict[str, Any]:
        return {
            "BLOCKS_PADDED": triton.next_power_of_2(self.num_blocks),
            "VOCABULARY": self.logits.shape[1],
            "HAS_SOFTCAP": self.softcap is not None,
            "HAS_PENALTY": self.repetition is not None,
            **LAUNCH,
        }


def penalised_statistics(
    scores: Scores, maxima: Tensor, denominators: Tensor
) -> tuple[Tensor, Tensor]:
    """Max and denominator, each (rows, blocks), of every block after the penalty."""
    new_maxima, new_denominators = torch.empty_like(maxima), torch.empty_like(denominators)
    _penalised_statistics[(scores.num_rows, scores.num_blocks)](
        *scores.arguments,
        maxima,
        denominators,
        new_maxima,
        new_denominators,
        BLOCK=BLOCK,
        **scores.options,
    )
    return new_maxima, new_denominators


def smallest_weights(
    scores: Scores, filters: Filters, is_greedy: Tensor, maxima: Tensor, denominators: Tensor
) -> Tensor:
    """The smallest weight that all filters of a row keep, 0 if it has none; (rows,).

    Top-k is first, then top-p of what it leaves; tokens as likely as the last one are kept as well.
    """
    floors = torch.empty_like(scores.temperature)
    _smallest_weights[(scores.num_rows,)](
        *scores.arguments, filters.top_k, filters.top_p, filters.min_p, is_greedy,
        maxima, denominators, floors,
        BLOCK=SEARCH_BLOCK,
        **scores.options | {"num_warps": SEARCH_WARPS},
    )  # fmt: skip
    return floors


def kept_denominators(
    scores: Scores, floors: Tensor, maxima: Tensor, denominators: Tensor
) -> Tensor:
    """The denominator of every block without the tokens whose weight is below their row's floor."""
    kept = torch.empty_like(denominators)
    _kept_denominators[(scores.num_rows, scores.num_blocks)](
        *scores.arguments, floors, maxima, denominators, kept, BLOCK=BLOCK, **scores.options
    )
    return kept


# ---- shared with the draw ------------------------------------------------------------------------


@triton.jit
def choice_scores(
    logits, seen, block, temperature, penalty, scale, softcap,
    VOCABULARY: tl.constexpr, BLOCK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_PENALTY: tl.constexpr,
):  # fmt: skip
    """As `load_scores`, with the repetition penalty; `seen` is the row's first entry."""
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    is_token = tokens < VOCABULARY
    z = capped(tl.load(logits + tokens, mask=is_token, other=0.0), scale, softcap, HAS_SOFTCAP)
    if HAS_PENALTY:
        num_read = tl.where(penalty != 1, VOCABULARY, 0)
        is_seen = tl.load(seen + tokens, mask=tokens < num_read, other=0) != 0
        z = tl.where(is_seen, tl.where(z > 0, tl.div_rn(z, penalty), z * penalty), z)
    return tl.where(is_token, over_temperature(z, temperature), float("-inf"))


# ---- the search ----------------------------------------------------------------------------------


@triton.jit
def _sums_above(
    logits, seen, temperature, penalty, scale, softcap, row_max,
    least, first, second, third, most,
    BY_WEIGHT: tl.constexpr, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_PENALTY: tl.constexpr,
):  # fmt: skip
    """How many weights of a row, or how much weight, lie above each of three.

    And the smallest weight above `least` and the largest up to `most`.
    """
    above_first = tl.zeros([BLOCK], tl.float32)
    above_second = tl.zeros([BLOCK], tl.float32)
    above_third = tl.zeros([BLOCK], tl.float32)
    smallest = tl.full([BLOCK], float("inf"), tl.float32)
    largest = tl.zeros([BLOCK], tl.float32)
    for block in range((VOCABULARY + BLOCK - 1) // BLOCK):
        z = choice_scores(
            logits, seen, block, temperature, penalty, scale, softcap,
            VOCABULARY, BLOCK, HAS_SOFTCAP, HAS_PENALTY,
        )  # fmt: skip
        weight = tl.exp(z - row_max)
        amount = weight if BY_WEIGHT else tl.full([BLOCK], 1.0, tl.float32)
        above_first += tl.where(weight > first, amount, 0.0)
        above_second += tl.where(weight > second, amount, 0.0)
        above_third += tl.where(weight > third, amount, 0.0)
        smallest = tl.minimum(smallest, tl.where(weight > least, weight, float("inf")))
        largest = tl.maximum(largest, tl.where(weight <= most, weight, 0.0))
    return (
        tl.sum(above_first.to(tl.float64), 0),
        tl.sum(above_second.to(tl.float64), 0),
        tl.sum(above_third.to(tl.float64), 0),
        tl.min(smallest, 0),
        tl.max(largest, 0),
    )


@triton.jit
def _search(
    logits, seen, temperature, penalty, scale, softcap, row_max,
    low, limit,
    BY_WEIGHT: tl.constexpr, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_PENALTY: tl.constexpr,
):  # fmt: skip
    """The smallest weight above the one with bits `low` for which the sum above is below `limit`.

    It lies in (low, high] all the time, and it occurs in the row. So the interval also shrinks to
    the weights that occur, and ends as soon as there is only one: early where many are equal.
    """
    high = tl.full([], ONE_BITS, tl.int32)
    while high - low > 1:
        step = tl.maximum((high - low) // 4, 1)
        first, second, third = low + step, low + 2 * step, low + 3 * step
        above_first, above_second, above_third, smallest, largest = _sums_above(
            logits, seen, temperature, penalty, scale, softcap, row_max,
            low.to(tl.float32, bitcast=True),
            first.to(tl.float32, bitcast=True),
            second.to(tl.float32, bitcast=True),
            third.to(tl.float32, bitcast=True),
            high.to(tl.float32, bitcast=True),
            BY_WEIGHT, VOCABULARY, BLOCK, HAS_SOFTCAP, HAS_PENALTY,
        )  # fmt: skip
        high = tl.where(above_third < limit, third, high)
        high = tl.where(above_second < limit, second, high)
        high = tl.where(above_first < limit, first, high)
        low = tl.where(above_first < limit, low, first)
        low = tl.where(above_second < limit, low, second)
        low = tl.where(above_third < limit, low, third)
        high = tl.minimum(high, largest.to(tl.int32, bitcast=True))
        low = tl.maximum(low, smallest.to(tl.int32, bitcast=True) - 1)
    return high


@triton.jit
def _mass_of_top_k(
    logits, seen, temperature, penalty, scale, softcap, row_max,
    last, top_k,
    VOCABULARY: tl.constexpr, BLOCK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_PENALTY: tl.constexpr,
):  # fmt: skip
    """The sum of the k largest weights; of those equal to `last` only as many count as make k."""
    count = tl.zeros([BLOCK], tl.float32)
    mass = tl.zeros([BLOCK], tl.float32)
    for block in range((VOCABULARY + BLOCK - 1) // BLOCK):
        z = choice_scores(
            logits, seen, block, temperature, penalty, scale, softcap,
            VOCABULARY, BLOCK, HAS_SOFTCAP, HAS_PENALTY,
        )  # fmt: skip
        weight = tl.exp(z - row_max)
        count += tl.where(weight > last, 1.0, 0.0)
        mass += tl.where(weight > last, weight, 0.0)
    num_last = top_k - tl.sum(count.to(tl.float64), 0)
    return tl.sum(mass.to(tl.float64), 0) + num_last * last


@triton.jit
def _smallest_weights(
    logits, seen, temperatures, penalties, row_step, seen_step, scale, softcap, num_blocks,
    top_ks, top_ps, min_ps, are_greedy, maxima, denominators, floors,
    BLOCKS_PADDED: tl.constexpr, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_PENALTY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    temperature, penalty = tl.load(temperatures + row), tl.load(penalties + row)
    top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
    is_drawn = tl.load(are_greedy + row) == 0
    uses_top_k = (top_k > 0) & (top_k < VOCABULARY) & is_drawn
    uses_top_p = (top_p < 1) & is_drawn
    logits += row * row_step
    seen += row * seen_step
    first = row * num_blocks
    row_max, _, parts = row_statistics(
        maxima + first, denominators + first, num_blocks, BLOCKS_PADDED
    )
    denominator = tl.sum(parts.to(tl.float64), 0)

    # Weights of 0 are never drawn: the search may begin above them.
    bits = tl.zeros([], tl.int32)
    if uses_top_k:
        bits = _search(
            logits, seen, temperature, penalty, scale, softcap, row_max,
            bits, top_k.to(tl.float64),
            False, VOCABULARY, BLOCK, HAS_SOFTCAP, HAS_PENALTY,
        )  # fmt: skip
    if uses_top_p:
        # Tokens of weight up to this have less than 1 - p together, whatever there is.
        low = (
            ((1 - top_p) * denominator / (2 * VOCABULARY)).to(tl.float32).to(tl.int32, bitcast=True)
        )
        if uses_top_k:
            denominator = _mass_of_top_k(
                logits, seen, temperature, penalty, scale, softcap, row_max,
                bits.to(tl.float32, bitcast=True), top_k,
                VOCABULARY, BLOCK, HAS_SOFTCAP, HAS_PENALTY,
            )  # fmt: skip
            low = bits - 1
        bits = _search(
            logits, seen, temperature, penalty, scale, softcap, row_max,
            low, top_p * denominator,
            True, VOCABULARY, BLOCK, HAS_SOFTCAP, HAS_PENALTY,
        )  # fmt: skip
    floor = tl.where(is_drawn, tl.load(min_ps + row), 0.0)
    tl.store(floors + row, tl.maximum(bits.to(tl.float32, bitcast=True), floor))


# ---- blocks after a filter -----------------------------------------------------------------------


@triton.jit
def _penalised_statistics(
    logits, seen, temperatures, penalties, row_step, seen_step, scale, softcap, num_blocks,
    maxima, denominators, new_maxima, new_denominators,
    BLOCKS_PADDED: tl.constexpr, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_PENALTY: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    index = row * num_blocks + block
    block_max, denominator = tl.load(maxima + index), tl.load(denominators + index)
    penalty = tl.load(penalties + row)
    if penalty != 1:
        z = choice_scores(
            logits + row * row_step, seen + row * seen_step, block,
            tl.load(temperatures + row), penalty, scale, softcap,
            VOCABULARY, BLOCK, HAS_SOFTCAP, HAS_PENALTY,
        )  # fmt: skip
        block_max = tl.max(z, 0)
        denominator = tl.sum(tl.exp(z - tl.where(block_max == float("-inf"), 0.0, block_max)), 0)
    tl.store(new_maxima + index, block_max)
    tl.store(new_denominators + index, denominator)


@triton.jit
def _kept_denominators(
    logits, seen, temperatures, penalties, row_step, seen_step, scale, softcap, num_blocks,
    floors, maxima, denominators, kept_denominators,
    BLOCKS_PADDED: tl.constexpr, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_PENALTY: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = row * num_blocks
    kept, floor = tl.load(denominators + first + block), tl.load(floors + row)
    if floor > 0:
        row_max, _, _ = row_statistics(
            maxima + first, denominators + first, num_blocks, BLOCKS_PADDED
        )
        block_max = tl.load(maxima + first + block)
        if tl.exp(block_max - row_max) < floor:  # nothing of this block is kept, nor read
            kept = kept * 0.0
        else:
            z = choice_scores(
                logits + row * row_step, seen + row * seen_step, block,
                tl.load(temperatures + row), tl.load(penalties + row), scale, softcap,
                VOCABULARY, BLOCK, HAS_SOFTCAP, HAS_PENALTY,
            )  # fmt: skip
            is_kept = tl.exp(z - row_max) >= floor
            kept = tl.sum(tl.where(is_kept, tl.exp(z - block_max), 0.0), 0)
    tl.store(kept_denominators + first + block, kept)

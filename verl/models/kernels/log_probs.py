"""The log-probability of given tokens and the entropy, from logits in one read. Triton.

The score z of a token is `softcap(logit * scale) / temperature`, in fp32 from logits in any dtype;
no fp32 copy of the logits is made. Each row is split into blocks of `BLOCK` logits. One kernel
writes three numbers per block, as in online softmax,

    max = max z        denominator = sum exp(z - max)        moment = sum exp(z - max) z

and a second merges the blocks of a row. Nothing depends on the other rows. The gradient is written
over the logits. The matrix product that makes the logits is the caller's.

A caller that needs the same log-sum-exp bit for bit (the sampler) uses `block_statistics`, which is
one kernel for all callers: it sums weights in the same order with and without moments.
`log_sum_exp` merges the blocks inside any other kernel: in pairs, an order that no compiler
changes.
"""

# Types do not know `kernel[grid](...)`.
# pyright: reportIndexIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, BLOCK_WARPS = 2048, 2
"""Few threads that each hold many logits: a block costs reductions, which all of them wait for."""

GRADIENT_BLOCK, GRADIENT_WARPS = 2048, 4

LAUNCH = {"num_warps": 4, "enable_fp_fusion": False}
"""Fused multiply-adds would be the compiler's choice, another one in each kernel."""

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1e9)
"""Scores below it have weight 0; minus infinity times 0 would be NaN."""

NO_WEIGHT = tl.constexpr(-200.0)
"""2 to this power is 0 in fp32, and unlike minus infinity it can be multiplied by 0."""


def logits_log_probs(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float | Tensor,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """log p(target), log-sum-exp and mean of the scores z; (rows,) in fp32 for logits (rows, V).

    There may be a temperature for each row, (rows,) in fp32.
    The mean is under the row's own distribution: entropy = log-sum-exp - mean. A target outside
    the vocabulary gives NaN.
    """
    num_rows, vocabulary = logits.shape
    if isinstance(temperature, Tensor):
        temperatures = temperature.contiguous()
    else:
        temperatures = logits.new_full((num_rows,), temperature, dtype=torch.float32)
    num_blocks = triton.cdiv(vocabulary, BLOCK)
    moments = logits.new_empty(num_rows, num_blocks, dtype=torch.float32)
    maxima, denominators = block_statistics(
        logits, temperatures, scale=scale, softcap=softcap, moments=moments
    )
    log_prob, log_sum, mean = (torch.empty_like(temperatures) for _ in range(3))
    if num_rows:
        _finish_rows[(num_rows,)](
            logits, temperatures, targets.contiguous(), maxima, denominators, moments,
            log_prob, log_sum, mean,
            logits.stride(0), float(scale), float(softcap or 0), num_blocks,
            VOCABULARY=vocabulary,
            BLOCKS_PADDED=triton.next_power_of_2(num_blocks),
            HAS_SOFTCAP=softcap is not None,
            **LAUNCH | {"num_warps": 1},  # a row's blocks are few
        )  # fmt: skip
    return log_prob, log_sum, mean


def logits_gradient_(
    logits: Tensor,
    targets: Tensor,
    log_sum: Tensor,
    mean: Tensor,
    grad_log_prob: Tensor,
    grad_entropy: Tensor,
    *,
    temperature: float,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Overwrite raw logits (rows, V) with the gradient with respect to them, in their dtype.

        dz_v = g_log_prob ([v = target] - p_v) + g_entropy p_v (mean - z_v)

    `log_sum` and `mean` are those of `logits_log_probs`; the other vectors are (rows,) in fp32.
    """
    num_rows, vocabulary = logits.shape
    vectors = [x.contiguous() for x in (targets, log_sum, mean, grad_log_prob, grad_entropy)]
    if num_rows:
        _overwrite_with_gradient[(num_rows * triton.cdiv(vocabulary, GRADIENT_BLOCK),)](
            logits, *vectors,
            logits.stride(0), float(temperature), float(scale), float(softcap or 0),
            VOCABULARY=vocabulary,
            BLOCK=GRADIENT_BLOCK,
            HAS_SOFTCAP=softcap is not None,
            num_warps=GRADIENT_WARPS,
        )  # fmt: skip
    return logits


def block_statistics(
    logits: Tensor,
    temperatures: Tensor,
    *,
    scale: float,
    softcap: float | None,
    moments: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Max and denominator of every block, each (rows, blocks) in fp32; fills `moments` if given.

    `temperatures` is (rows,) in fp32. The logits' rows are contiguous; for equal bits they must
    also start at equal alignment, as they do in any tensor that was allocated whole.
    """
    num_rows, vocabulary = logits.shape
    if logits.stride(1) != 1:
        raise ValueError(f"logits have strides {logits.stride()}; each row must be contiguous")
    shape = (num_rows, triton.cdiv(vocabulary, BLOCK))
    maxima, denominators = (logits.new_empty(shape, dtype=torch.float32) for _ in range(2))
    if num_rows:
        _block_statistics[(num_rows * shape[1],)](
            logits, temperatures, maxima, denominators,
            denominators if moments is None else moments,
            logits.stride(0), float(scale), float(softcap or 0),
            VOCABULARY=vocabulary,
            BLOCK=BLOCK,
            HAS_SCALE=scale != 1,
            HAS_SOFTCAP=softcap is not None,
            HAS_MOMENTS=moments is not None,
            **LAUNCH | {"num_warps": BLOCK_WARPS},
        )  # fmt: skip
    return maxima, denominators


# ---- functions that other kernels share ----------------------------------------------------------


@triton.jit
def capped(logit, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """softcap(logit * scale) in fp32; `softcap` is read only with `HAS_SOFTCAP`."""
    z = logit.to(tl.float32) * scale
    if HAS_SOFTCAP:
        z = softcap * (2 * tl.sigmoid(2 * z / softcap) - 1)  # tanh
    return z


@triton.jit
def score(logit, temperature, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """softcap(logit * scale) / temperature in fp32."""
    return over_temperature(capped(logit, scale, softcap, HAS_SOFTCAP), temperature)


@triton.jit
def over_temperature(z, temperature):
    """z / temperature, rounded to nearest."""
    if temperature != 1:  # a division costs more than the rest together
        z = tl.div_rn(z, temperature)
    return z


@triton.jit
def load_scores(
    logits, block, temperature, scale, softcap,
    VOCABULARY: tl.constexpr, BLOCK: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Scores of one block of the row that starts at `logits`, minus infinity past its end."""
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    is_token = tokens < VOCABULARY
    z = score(
        tl.load(logits + tokens, mask=is_token, other=0.0), temperature, scale, softcap, HAS_SOFTCAP
    )
    return tl.where(is_token, z, float("-inf"))


@triton.jit
def row_statistics(maxima, denominators, num_blocks, BLOCKS_PADDED: tl.constexpr):
    """Max of a row, max of each of its blocks, and each block's part of the row's denominator.

    The pointers are those of the row's first block; blocks of a row are contiguous.
    """
    blocks = tl.arange(0, BLOCKS_PADDED)
    is_block = blocks < num_blocks
    block_max = tl.load(maxima + blocks, mask=is_block, other=float("-inf"))
    row_max = tl.max(block_max, 0)
    denominator = tl.load(denominators + blocks, mask=is_block, other=0.0)
    return row_max, block_max, denominator * tl.exp(block_max - row_max)


@triton.jit
def log_sum_exp(row_max, parts):
    """Log-sum-exp of a row from its max and the parts of its denominator."""
    return row_max + tl.log(sum_in_pairs(parts))


@triton.jit
def sum_in_pairs(x):
    """Neighbours are added, then neighbours among those sums: the order is part of the program."""
    for _ in tl.static_range(num_halvings(x.shape[0])):
        even, odd = tl.split(tl.reshape(x, [x.shape[0] // 2, 2]))
        x = even + odd
    return tl.sum(x, 0)


@triton.constexpr_function
def num_halvings(size):
    return size.bit_length() - 1


# ---- kernels -------------------------------------------------------------------------------------


@triton.jit
def _block_statistics(
    logits, temperatures, maxima, denominators, moments, row_step, scale, softcap,
    VOCABULARY: tl.constexpr, BLOCK: tl.constexpr,
    HAS_SCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_MOMENTS: tl.constexpr,
):  # fmt: skip
    """Statistics of one block of a row.

    The division by the temperature is a factor of differences to the max, and is done exactly for
    the max alone, so it costs nothing. A block whose logits are all minus infinity adds nothing.
    """
    index, row, block = _row_and_block(VOCABULARY, BLOCK)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    is_token = tokens < VOCABULARY
    x = tl.load(logits + row * row_step + tokens, mask=is_token, other=float("-inf"))
    x = x.to(tl.float32)
    if HAS_SCALE or HAS_SOFTCAP:
        x = tl.where(is_token, capped(x, scale, softcap, HAS_SOFTCAP), float("-inf"))
    capped_max = tl.max(x, 0)
    base = tl.where(capped_max == float("-inf"), 0.0, capped_max)
    temperature = tl.load(temperatures + row)
    power = (x - base) * (LOG2_E / temperature)
    if HAS_MOMENTS:
        power = tl.maximum(power, NO_WEIGHT, propagate_nan=tl.PropagateNan.ALL)
    weight = tl.exp2(power)
    denominator = tl.sum(weight, 0)
    block_max = over_temperature(capped_max, temperature)
    tl.store(maxima + index, block_max)
    tl.store(denominators + index, denominator)
    if HAS_MOMENTS:
        moment = (
            tl.where(denominator == 0, 0.0, block_max * denominator)
            + tl.sum(weight * power, 0) * LN_2
        )
        tl.store(moments + index, moment)


@triton.jit
def _finish_rows(
    logits, temperatures, targets, maxima, denominators, moments, log_probs, log_sums, means,
    row_step, scale, softcap, num_blocks,
    VOCABULARY: tl.constexpr, BLOCKS_PADDED: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    first = row * num_blocks
    row_max, block_max, parts = row_statistics(
        maxima + first, denominators + first, num_blocks, BLOCKS_PADDED
    )
    log_sum = log_sum_exp(row_max, parts)
    blocks = tl.arange(0, BLOCKS_PADDED)
    moment = tl.load(moments + first + blocks, mask=blocks < num_blocks, other=0.0)
    weight = tl.exp(block_max - row_max)
    # The moment of a block without weight may be infinite (a vocabulary that is masked).
    mean = tl.sum(tl.where(weight == 0, 0.0, moment * weight), 0) / tl.sum(parts, 0)
    target = tl.load(targets + row)
    is_token = (target >= 0) & (target < VOCABULARY)
    logit = tl.load(logits + row * row_step + target, mask=is_token, other=float("nan"))
    z = score(logit, tl.load(temperatures + row), scale, softcap, HAS_SOFTCAP)
    tl.store(log_probs + row, z - log_sum)
    tl.store(log_sums + row, log_sum)
    tl.store(means + row, mean)


@triton.jit
def _overwrite_with_gradient(
    logits, targets, log_sums, means, grad_log_probs, grad_entropies,
    row_step, temperature, scale, softcap,
    VOCABULARY: tl.constexpr, BLOCK: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    _, row, block = _row_and_block(VOCABULARY, BLOCK)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    pointers, is_token = logits + row * row_step + tokens, tokens < VOCABULARY
    x = tl.load(pointers, mask=is_token, other=0.0).to(tl.float32)
    slope = scale / temperature  # of z over x
    grad_log_prob = tl.load(grad_log_probs + row) * slope
    grad_entropy = tl.load(grad_entropies + row) * slope
    if HAS_SOFTCAP:
        x = capped(x, scale, softcap, HAS_SOFTCAP)
        slope = 1 / temperature
    p = tl.exp2(tl.fma(x, slope * LOG2_E, -tl.load(log_sums + row) * LOG2_E))
    z = tl.maximum(x, LOWEST, propagate_nan=tl.PropagateNan.ALL) * slope
    pull = grad_entropy * (tl.load(means + row) - z) - grad_log_prob
    # Where the target lies in this block, if it does.
    target = tl.load(targets + row) - block * BLOCK
    target = tl.where((target >= 0) & (target < BLOCK), target, -1).to(tl.int32)
    grad = p * pull + tl.where(tl.arange(0, BLOCK) == target, grad_log_prob, 0.0)
    if HAS_SOFTCAP:
        tanh = x / softcap
        grad *= 1 - tanh * tanh
    tl.store(pointers, grad.to(logits.dtype.element_ty), mask=is_token)


@triton.jit
def _row_and_block(VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    """Index of the program's block among all blocks, its row, and its index in that row."""
    program = tl.program_id(0)
    num_blocks: tl.constexpr = (VOCABULARY + BLOCK - 1) // BLOCK
    return program.to(tl.int64), (program // num_blocks).to(tl.int64), program % num_blocks

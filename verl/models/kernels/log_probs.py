"""The log-probability of given tokens and the entropy, from logits in one read. Triton.

A score is `softcap(logit * scale) / temperature`, in fp32 from logits in any dtype; no fp32 copy of
the logits is made. Each row is cut into blocks of `BLOCK` logits. One kernel leaves three numbers
for every block,

    top = max z        total = sum exp(z - top)        moment = sum exp(z - top) z

and a second merges the blocks of a row in their order. Nothing depends on the other rows. The
gradient is written over the logits. The matrix product that makes the logits is the caller's.

Whoever needs the same log-sum-exp bit for bit (the sampler) calls `block_statistics`, which is one
compiled kernel for all callers, and merges with `merge_blocks` in a kernel of its own, launched
with `LAUNCH`. `row_block_stats` is the same arithmetic for use inside another kernel; the compiler
then chooses the order of the sum within a block anew, and agreement is to rounding.
"""

# Types do not know `kernel[grid](...)`.
# pyright: reportIndexIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
LAUNCH = {"num_warps": 8, "enable_fp_fusion": False}
"""Fused multiply-adds would be the compiler's choice, another one in each kernel."""


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
    statistics = block_statistics(logits, temperatures, scale=scale, softcap=softcap)
    num_blocks = triton.cdiv(vocabulary, BLOCK)
    log_prob, log_sum, mean = (torch.empty_like(temperatures) for _ in range(3))
    if num_rows:
        _finish_rows[(num_rows,)](
            logits, temperatures, targets.contiguous(), *statistics, log_prob, log_sum, mean,
            logits.stride(0), float(scale), float(softcap or 0), num_blocks,
            VOCABULARY=vocabulary,
            BLOCKS_PADDED=triton.next_power_of_2(num_blocks),
            HAS_SOFTCAP=softcap is not None,
            **LAUNCH,
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
        _overwrite_with_gradient[(num_rows, triton.cdiv(vocabulary, BLOCK))](
            logits, *vectors,
            logits.stride(0), float(temperature), float(scale), float(softcap or 0),
            VOCABULARY=vocabulary,
            BLOCK=BLOCK,
            HAS_SOFTCAP=softcap is not None,
            **LAUNCH,
        )  # fmt: skip
    return logits


def block_statistics(
    logits: Tensor, temperatures: Tensor, *, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Top, total and moment of every block, each (rows, blocks) in fp32.

    `temperatures` is (rows,) in fp32. The logits' rows are contiguous; for equal bits they must
    also start at equal alignment, as they do in any tensor that was allocated whole.
    """
    num_rows, vocabulary = logits.shape
    if logits.stride(1) != 1:
        raise ValueError(f"logits have strides {logits.stride()}; each row must be contiguous")
    shape = (num_rows, triton.cdiv(vocabulary, BLOCK))
    tops, totals, moments = (logits.new_empty(shape, dtype=torch.float32) for _ in range(3))
    if num_rows:
        _block_statistics[shape](
            logits, temperatures, tops, totals, moments,
            logits.stride(0), float(scale), float(softcap or 0),
            VOCABULARY=vocabulary,
            BLOCK=BLOCK,
            HAS_SOFTCAP=softcap is not None,
            **LAUNCH,
        )  # fmt: skip
    return tops, totals, moments


# ---- parts that other kernels share --------------------------------------------------------------


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
    z = capped(logit, scale, softcap, HAS_SOFTCAP)
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
def row_block_stats(
    logits, block, temperature, scale, softcap,
    VOCABULARY: tl.constexpr, BLOCK: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Scores of one block of the row that starts at `logits`, and its top, total and moment.

    A block whose logits are all minus infinity adds nothing.
    """
    z = load_scores(logits, block, temperature, scale, softcap, VOCABULARY, BLOCK, HAS_SOFTCAP)
    top = tl.max(z, 0)
    weight = tl.exp(z - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(weight, 0)
    moment = tl.sum(tl.where(weight == 0, 0.0, weight * z), 0)
    return z, top, total, moment


@triton.jit
def merge_blocks(tops, totals, moments, num_blocks, BLOCKS_PADDED: tl.constexpr):
    """Log-sum-exp and mean of a row from its blocks, added up in their order.

    The pointers are those of the row's first block; blocks of a row are neighbours.
    """
    blocks = tl.arange(0, BLOCKS_PADDED)
    top = tl.max(tl.load(tops + blocks, mask=blocks < num_blocks, other=float("-inf")), 0)
    total = tl.full([], 0.0, tl.float32)
    moment = tl.full([], 0.0, tl.float32)
    for block in range(num_blocks):
        share = tl.exp(tl.load(tops + block) - top)
        total += tl.load(totals + block) * share
        moment += tl.load(moments + block) * share
    return top + tl.log(total), moment / total


# ---- kernels -------------------------------------------------------------------------------------


@triton.jit
def _block_statistics(
    logits, temperatures, tops, totals, moments, row_step, scale, softcap,
    VOCABULARY: tl.constexpr, BLOCK: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _, top, total, moment = row_block_stats(
        logits + row * row_step, block, tl.load(temperatures + row), scale, softcap,
        VOCABULARY, BLOCK, HAS_SOFTCAP,
    )  # fmt: skip
    place = row * tl.num_programs(1) + block
    tl.store(tops + place, top)
    tl.store(totals + place, total)
    tl.store(moments + place, moment)


@triton.jit
def _finish_rows(
    logits, temperatures, targets, tops, totals, moments, log_probs, log_sums, means,
    row_step, scale, softcap, num_blocks,
    VOCABULARY: tl.constexpr, BLOCKS_PADDED: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    first = row * num_blocks
    log_sum, mean = merge_blocks(
        tops + first, totals + first, moments + first, num_blocks, BLOCKS_PADDED
    )
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
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    places = logits + row * row_step + tokens
    z = load_scores(
        logits + row * row_step, block, temperature, scale, softcap,
        VOCABULARY, BLOCK, HAS_SOFTCAP,
    )  # fmt: skip
    grad_log_prob = tl.load(grad_log_probs + row)
    p = tl.exp(z - tl.load(log_sums + row))
    pull = tl.load(grad_entropies + row) * (tl.load(means + row) - z) - grad_log_prob
    grad = tl.where(p == 0, 0.0, p * pull)
    grad += tl.where(tokens == tl.load(targets + row), grad_log_prob, 0.0)
    if HAS_SOFTCAP:
        capped = z * temperature / softcap  # the tanh
        grad *= 1 - capped * capped
    grad *= scale / temperature
    tl.store(places, grad.to(logits.dtype.element_ty), mask=tokens < VOCABULARY)

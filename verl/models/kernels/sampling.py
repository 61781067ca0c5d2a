"""The next token of each row from its logits, and its log-probability, in one read. Triton.

`log_probs` leaves a few numbers for every block of a row's vocabulary. They give the log-sum-exp,
the very one of training, and say in which block the row's uniform number falls, so that only that
block is read again. There is no sort, no noise tensor and no copy of the logits. The uniform number
is a hash of (seed, token index): what a row draws does not depend on its neighbours. Sums that
decide the draw are in fp64.
"""

# Types do not know `kernel[grid](...)`.
# pyright: reportIndexIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from verl.models.kernels.log_probs import BLOCK, LAUNCH, block_statistics, load_scores, merge_blocks

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
) -> tuple[Tensor, Tensor]:
    """Token ids (B,) int64 and log-probabilities (B,) fp32 for raw logits (B, V).

    Scores are softcap(logits * scale) / temperature; greedy rows take the likeliest token.
    """
    num_rows, vocabulary = logits.shape
    num_blocks = triton.cdiv(vocabulary, BLOCK)
    tokens = torch.empty(num_rows, dtype=torch.long, device=logits.device)
    log_probs = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    statistics = block_statistics(logits, temperature, scale=scale, softcap=softcap)
    _draw[(num_rows,)](
        logits, temperature, is_greedy, seed, token_index, *statistics, tokens, log_probs,
        logits.stride(0), float(scale), float(softcap or 0), num_blocks,
        BLOCKS_PADDED=triton.next_power_of_2(num_blocks),
        VOCABULARY=vocabulary,
        BLOCK=BLOCK,
        HAS_SOFTCAP=softcap is not None,
        **LAUNCH,
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
    """In [0, 1) with 52 bits, as `verl.utils.scramble.uniform`."""
    golden = tl.full([], GOLDEN, tl.uint64)
    bits = _scrambled(_scrambled(seed.to(tl.uint64) + golden) + index.to(tl.uint64) * golden)
    return (bits >> 12).to(tl.float64) * 2.220446049250313e-16


@triton.jit
def _draw(
    logits, temperatures, are_greedy, seeds, indices, tops, sums, moments, tokens, log_probs,
    row_step, scale, softcap, num_blocks,
    BLOCKS_PADDED: tl.constexpr,
    VOCABULARY: tl.constexpr, BLOCK: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, BLOCKS_PADDED)
    is_block = blocks < num_blocks
    top = tl.load(tops + row * num_blocks + blocks, mask=is_block, other=float("-inf"))
    own = tl.load(sums + row * num_blocks + blocks, mask=is_block, other=0.0)
    highest = tl.max(top, 0)
    share = own * tl.exp(top - highest)
    first = row * num_blocks
    log_sum, _ = merge_blocks(
        tops + first, sums + first, moments + first, num_blocks, BLOCKS_PADDED
    )

    block = tl.argmax(top, 0)
    is_greedy = tl.load(are_greedy + row)
    inside = tl.full([], 0.0, tl.float64)
    if is_greedy == 0:
        weights = share.to(tl.float64)
        ends = tl.cumsum(weights, 0)
        total = tl.sum(weights, 0)
        point = _uniform(tl.load(seeds + row), tl.load(indices + row)) * total
        block = tl.minimum(tl.sum((ends <= point).to(tl.int32), 0), num_blocks - 1)
        chosen = tl.sum(tl.where(blocks == block, weights, 0.0), 0)
        end = tl.sum(tl.where(blocks == block, ends, 0.0), 0)
        inside = tl.minimum(tl.maximum((point - end + chosen) / chosen, 0.0), 1 - 2.0**-52)
    temperature = tl.load(temperatures + row)
    x = load_scores(
        logits + row * row_step, block, temperature, scale, softcap, VOCABULARY, BLOCK, HAS_SOFTCAP
    )
    place = tl.argmax(x, 0)
    if is_greedy == 0:
        weights_inside = tl.exp(x - tl.max(x, 0)).to(tl.float64)
        inside_ends = tl.cumsum(weights_inside, 0)
        goal = inside * tl.sum(weights_inside, 0)
        place = tl.minimum(tl.sum((inside_ends <= goal).to(tl.int32), 0), BLOCK - 1)
    token = tl.minimum(block * BLOCK + place, VOCABULARY - 1)
    score = tl.sum(tl.where(tl.arange(0, BLOCK) == token - block * BLOCK, x, 0.0), 0)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(log_probs + row, score - log_sum)

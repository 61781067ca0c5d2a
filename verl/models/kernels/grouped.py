"""Products of rows with the weights of their group, and sums of rows per token. Triton.

    x  [ rows of expert 0 | rows of expert 1 | ... ]        ends[e]: where the rows of e end
    y[r] = x[r] @ weight[e]    for each row r of expert e

A program computes a tile of `ROWS` rows of one expert; which expert, it finds from `ends`, so the
host never reads how many rows an expert has and a pass can be captured as a graph. Sums over the
inner dimension run in one order for any number of rows, so a row's bits depend on no other row.
Rows behind the last end belong to no group: they are neither read nor written.
"""

# Types know neither `kernel[grid](...)` nor `once_differentiable`.
# pyright: reportIndexIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 64
COLUMNS = 128
INNER = 64
BLOCK = 1024


def grouped_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """(S, N) for rows x (S, K), weight (E, K, N) of any strides and ends (E,)."""
    (num_rows, inner), (num_groups, _, width) = x.shape, weight.shape
    x = x.contiguous()
    y = x.new_empty(num_rows, width)
    if not num_rows:
        return y
    tile_ends = _tile_ends(ends)
    grid = (triton.cdiv(num_rows, ROWS) + num_groups, triton.cdiv(width, COLUMNS))
    _product[grid](
        x, weight, y, ends, tile_ends, inner, width, *weight.stride(), num_groups,
        GROUPS=triton.next_power_of_2(num_groups), ROWS=ROWS, COLUMNS=COLUMNS, INNER=INNER,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return y


def grouped_outer(left: Tensor, right: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
    """(E, M, N), of each group the sum over its rows r of left[r] outer right[r]."""
    num_groups, height, width = len(ends), left.shape[1], right.shape[1]
    left, right = left.contiguous(), right.contiguous()
    sums = torch.empty(num_groups, height, width, dtype=dtype, device=left.device)
    grid = (triton.cdiv(height, ROWS), triton.cdiv(width, COLUMNS), num_groups)
    _outer[grid](
        left, right, sums, ends, height, width,
        ROWS=ROWS, COLUMNS=COLUMNS, INNER=INNER, num_warps=4, num_stages=3,
    )  # fmt: skip
    return sums


def sum_rows(rows: Tensor, weights: Tensor | None, positions: Tensor) -> Tensor:
    """(N, width): for each token the sum over j of weights[n, j] rows[positions[n, j]], in fp32."""
    (num_tokens, per_token), width = positions.shape, rows.shape[1]
    rows = rows.contiguous()
    total = rows.new_empty(num_tokens, width)
    if num_tokens:
        _sum_rows[(num_tokens, triton.cdiv(width, BLOCK))](
            rows, positions if weights is None else weights.contiguous(), positions.contiguous(),
            total, width, PER_TOKEN=per_token, BLOCK=BLOCK, HAS_WEIGHTS=weights is not None,
            num_warps=4,
        )  # fmt: skip
    return total


def sum_rows_backward(
    grad: Tensor, rows: Tensor, weights: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of `sum_rows` for rows and weights; rows that no token uses get none (0)."""
    (num_tokens, per_token), width = positions.shape, rows.shape[1]
    rows, grad = rows.contiguous(), grad.contiguous()
    grad_rows, grad_weights = torch.zeros_like(rows), torch.empty_like(weights)
    if num_tokens:
        _sum_rows_backward[(num_tokens, per_token)](
            grad, rows, weights.contiguous(), positions.contiguous(), grad_rows, grad_weights,
            width, PER_TOKEN=per_token, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return grad_rows, grad_weights


def _tile_ends(ends: Tensor) -> Tensor:
    """How many tiles of `ROWS` rows the groups up to each one have."""
    counts = ends.diff(prepend=ends.new_zeros(1))
    return ((counts + ROWS - 1) // ROWS).cumsum(0, dtype=torch.int32)


@triton.jit
def _product(
    x, weight, y, ends, tile_ends, inner, width,
    group_step, inner_step, column_step, num_groups,
    GROUPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    groups = tl.arange(0, GROUPS)
    all_ends = tl.load(tile_ends + groups, mask=groups < num_groups, other=2147483647)
    group = tl.sum((all_ends <= tile).to(tl.int32))
    if group < num_groups:
        before = tl.maximum(group - 1, 0)
        first_tile = tl.where(group > 0, tl.load(tile_ends + before), 0)
        start = tl.where(group > 0, tl.load(ends + before), 0).to(tl.int64)
        end = tl.load(ends + group).to(tl.int64)
        rows = start + (tile - first_tile) * ROWS + tl.arange(0, ROWS)
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        row_mask, column_mask = rows < end, columns < width
        weight += group.to(tl.int64) * group_step
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for first in range(0, inner, INNER):
            k = first + tl.arange(0, INNER)
            mask = k < inner
            a = tl.load(
                x + rows[:, None] * inner + k[None, :],
                mask=row_mask[:, None] & mask[None, :], other=0.0,
            )  # fmt: skip
            b = tl.load(
                weight + k[:, None] * inner_step + columns[None, :] * column_step,
                mask=mask[:, None] & column_mask[None, :], other=0.0,
            )  # fmt: skip
            total = tl.dot(a, b, total, input_precision="ieee")
        tl.store(
            y + rows[:, None] * width + columns[None, :], total.to(y.dtype.element_ty),
            mask=row_mask[:, None] & column_mask[None, :],
        )  # fmt: skip


@triton.jit
def _outer(
    left, right, sums, ends, height, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(2)
    start = tl.where(group > 0, tl.load(ends + tl.maximum(group - 1, 0)), 0).to(tl.int64)
    end = tl.load(ends + group).to(tl.int64)
    lines = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    line_mask, column_mask = lines < height, columns < width
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for first in range(start, end, INNER):
        rows = first + tl.arange(0, INNER)
        mask = rows < end
        a = tl.load(
            left + rows[None, :] * height + lines[:, None],
            mask=mask[None, :] & line_mask[:, None], other=0.0,
        )  # fmt: skip
        b = tl.load(
            right + rows[:, None] * width + columns[None, :],
            mask=mask[:, None] & column_mask[None, :], other=0.0,
        )  # fmt: skip
        total = tl.dot(a, b, total, input_precision="ieee")
    sums += group.to(tl.int64) * height * width
    tl.store(
        sums + lines[:, None] * width + columns[None, :], total.to(sums.dtype.element_ty),
        mask=line_mask[:, None] & column_mask[None, :],
    )  # fmt: skip


@triton.jit
def _sum_rows(
    rows, weights, positions, total, width,
    PER_TOKEN: tl.constexpr, BLOCK: tl.constexpr, HAS_WEIGHTS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    sum = tl.zeros((BLOCK,), dtype=tl.float32)
    for j in range(PER_TOKEN):
        position = tl.load(positions + token * PER_TOKEN + j).to(tl.int64)
        row = tl.load(rows + position * width + columns, mask=mask, other=0.0).to(tl.float32)
        if HAS_WEIGHTS:
            row *= tl.load(weights + token * PER_TOKEN + j).to(tl.float32)
        sum += row
    tl.store(total + token * width + columns, sum.to(total.dtype.element_ty), mask=mask)


@triton.jit
def _sum_rows_backward(
    grad, rows, weights, positions, grad_rows, grad_weights, width,
    PER_TOKEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    pair = token * PER_TOKEN + tl.program_id(1)
    position = tl.load(positions + pair).to(tl.int64)
    weight = tl.load(weights + pair).to(tl.float32)
    product = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, width, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        mask = columns < width
        g = tl.load(grad + token * width + columns, mask=mask, other=0.0).to(tl.float32)
        row = tl.load(rows + position * width + columns, mask=mask, other=0.0).to(tl.float32)
        product += g * row
        tl.store(
            grad_rows + position * width + columns, (g * weight).to(grad_rows.dtype.element_ty),
            mask=mask,
        )  # fmt: skip
    tl.store(grad_weights + pair, tl.sum(product).to(grad_weights.dtype.element_ty))

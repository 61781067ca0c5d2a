"""Root-mean-square normalisation, forward and backward in one read each. Triton.

    y = weight * round(x r)        r = 1 / sqrt(mean(x^2) + eps)        as most models do it
    y = round((1 + weight) x r)    with `is_offset`, as Gemma does

Statistics and products are in fp32 and are rounded where transformers rounds. A program takes a
tile of rows whose size depends on the width alone, so a row's numbers do not depend on how many
rows there are.
"""

# Types know neither `kernel[grid](...)` nor `once_differentiable`.
# pyright: reportIndexIssue=false, reportIncompatibleMethodOverride=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

TILE_ELEMENTS = 4096
BACKWARD_ELEMENTS_PER_WARP = 2048
MAX_PARTIAL_SUMS = 528
"""Programs of the backward pass; each adds up its rows' part of the weight's gradient."""


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, is_offset: bool = False) -> Tensor:
    """Normalise the last dimension of `x`; `weight` is (width,)."""
    if weight.shape != x.shape[-1:]:
        raise ValueError(
            f"weight is {tuple(weight.shape)} and x is {tuple(x.shape)}; "
            "there must be one weight for each element of the last dimension"
        )
    return _RmsNorm.apply(x, weight, eps, is_offset)  # pyright: ignore[reportReturnType]


def reference_rms_norm(x: Tensor, weight: Tensor, eps: float, *, is_offset: bool = False) -> Tensor:
    """The same in plain torch."""
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    if is_offset:
        return ((1 + weight.float()) * normed).to(x.dtype)
    return weight * normed.to(x.dtype)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, is_offset: bool) -> Tensor:
        rows = x.contiguous().view(-1, x.shape[-1])
        dtype = x.dtype if is_offset else torch.promote_types(x.dtype, weight.dtype)
        y = torch.empty_like(rows, dtype=dtype)
        options = _options(rows.shape[1], is_offset)
        if len(rows):
            _norm_forward[(triton.cdiv(len(rows), options["TILE"]),)](
                rows, weight.contiguous(), y, len(rows), eps, **options
            )
        ctx.save_for_backward(rows, weight)
        ctx.eps, ctx.is_offset, ctx.shape = eps, is_offset, x.shape
        return y.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        options = _options(rows.shape[1], ctx.is_offset)
        num_elements = options["TILE"] * options["BLOCK"]
        options["num_warps"] = max(2, num_elements // BACKWARD_ELEMENTS_PER_WARP)
        num_tiles = triton.cdiv(len(rows), options["TILE"])
        tiles_each = max(1, triton.cdiv(num_tiles, MAX_PARTIAL_SUMS))
        num_programs = triton.cdiv(num_tiles, tiles_each)
        grad_x = torch.empty_like(rows)
        partial = rows.new_empty((num_programs, rows.shape[1]), dtype=torch.float32)
        if num_programs:
            _norm_backward[(num_programs,)](
                gradients[0].contiguous(), rows, weight.contiguous(), grad_x, partial,
                len(rows), tiles_each, ctx.eps, **options,
            )  # fmt: skip
        return grad_x.view(ctx.shape), partial.sum(0).to(weight.dtype), None, None


def _options(width: int, is_offset: bool) -> dict[str, Any]:
    block = triton.next_power_of_2(width)
    tile = max(1, TILE_ELEMENTS // block)
    return {
        "WIDTH": width,
        "BLOCK": block,
        "TILE": tile,
        "IS_OFFSET": is_offset,
        "num_warps": min(16, max(8, block // 512)),
    }


@triton.jit
def _normed(x, eps, WIDTH: tl.constexpr):
    """x r and r of a tile of rows in fp32; elements past the width are 0."""
    inverse = tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)
    return x * inverse[:, None], inverse


@triton.jit
def _norm_forward(
    x, weight, y, num_rows, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, IS_OFFSET: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    columns = tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]
    places = rows[:, None] * WIDTH + columns[None, :]
    x_tile = tl.load(x + places, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(weight + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    normed, _ = _normed(x_tile, eps, WIDTH)
    if IS_OFFSET:
        result = normed * (1 + w)[None, :]
    else:
        result = normed.to(x.dtype.element_ty).to(tl.float32) * w[None, :]
    tl.store(y + places, result.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _norm_backward(
    grad_y, x, weight, grad_x, partial, num_rows, tiles_each, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, IS_OFFSET: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_column = columns < WIDTH
    w = tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)
    if IS_OFFSET:
        w = w + 1
    grad_weight = tl.zeros([BLOCK], tl.float32)
    for tile in range(tiles_each):
        rows = (program * tiles_each + tile) * TILE + tl.arange(0, TILE)
        mask = (rows < num_rows)[:, None] & is_column[None, :]
        places = rows[:, None] * WIDTH + columns[None, :]
        x_tile = tl.load(x + places, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_y + places, mask=mask, other=0.0).to(tl.float32)
        normed, inverse = _normed(x_tile, eps, WIDTH)
        grad_normed = grad * w[None, :]
        along = tl.sum(grad_normed * normed, 1) / WIDTH
        result = (grad_normed - normed * along[:, None]) * inverse[:, None]
        tl.store(grad_x + places, result.to(grad_x.dtype.element_ty), mask=mask)
        if not IS_OFFSET:
            normed = normed.to(x.dtype.element_ty).to(tl.float32)
        grad_weight += tl.sum(grad * normed, 0)
    tl.store(partial + program * WIDTH + columns, grad_weight, mask=is_column)

"""Root-mean-square normalisation, forward and backward in one read each. Triton.

    y = weight * round(x r)        r = 1 / sqrt(mean(x^2) + eps)        as most models do it
    y = round((1 + weight) x r)    with `is_offset`, as Gemma does

`add_rms_norm` also makes x = round(residual + delta) on the way, and adds the gradients for x.

Statistics and products are in fp32 and are rounded where transformers rounds. A program takes a
tile of rows whose size depends on the width alone, so a row's numbers do not depend on how many
rows there are. A sum is rounded before it is normed, so its norm has the bits it would have had
if the sum had been made elsewhere.
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
    _check_weight(x, weight)
    return _RmsNorm.apply(x, weight, eps, is_offset)  # pyright: ignore[reportReturnType]


def add_rms_norm(
    residual: Tensor, delta: Tensor, weight: Tensor, eps: float, *, is_offset: bool = False
) -> tuple[Tensor, Tensor]:
    """residual + delta, and `rms_norm` of it; the bits of one after the other."""
    _check_weight(residual, weight)
    if residual.shape != delta.shape or residual.dtype != delta.dtype:
        raise ValueError(
            f"residual is {residual.dtype} {tuple(residual.shape)} and delta is {delta.dtype} "
            f"{tuple(delta.shape)}; they must be alike: add them in torch and use rms_norm"
        )
    return _AddRmsNorm.apply(  # pyright: ignore[reportReturnType]
        residual, delta, weight, eps, is_offset
    )


def _check_weight(x: Tensor, weight: Tensor) -> None:
    if weight.shape != x.shape[-1:]:
        raise ValueError(
            f"weight is {tuple(weight.shape)} and x is {tuple(x.shape)}; "
            "there must be one weight for each element of the last dimension"
        )


def reference_rms_norm(x: Tensor, weight: Tensor, eps: float, *, is_offset: bool = False) -> Tensor:
    """The same in plain torch."""
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    if is_offset:
        return ((1 + weight.float()) * normed).to(x.dtype)
    return weight * normed.to(x.dtype)


def reference_add_rms_norm(
    residual: Tensor, delta: Tensor, weight: Tensor, eps: float, *, is_offset: bool = False
) -> tuple[Tensor, Tensor]:
    """The same in plain torch."""
    total = residual + delta
    return total, reference_rms_norm(total, weight, eps, is_offset=is_offset)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, is_offset: bool) -> Tensor:
        x, y = _forward(x, None, weight, eps, is_offset)
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.is_offset = eps, is_offset
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_x, grad_weight = _backward(gradients[0], None, x, weight, ctx.eps, ctx.is_offset)
        return grad_x, grad_weight, None, None


class _AddRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, residual: Tensor, delta: Tensor, weight: Tensor, eps: float, is_offset: bool
    ) -> tuple[Tensor, Tensor]:
        total, y = _forward(residual, delta, weight, eps, is_offset)
        ctx.save_for_backward(total, weight)
        ctx.eps, ctx.is_offset = eps, is_offset
        ctx.set_materialize_grads(False)
        return total, y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        total, weight = ctx.saved_tensors
        grad, grad_y = gradients
        grad_weight = None
        if grad_y is not None:
            grad, grad_weight = _backward(grad_y, grad, total, weight, ctx.eps, ctx.is_offset)
        return grad, grad, grad_weight, None, None


def _forward(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, is_offset: bool
) -> tuple[Tensor, Tensor]:
    """x + delta (x itself where there is none) and its norm."""
    x = x.contiguous()
    total = x if delta is None else torch.empty_like(x)
    dtype = x.dtype if is_offset else torch.promote_types(x.dtype, weight.dtype)
    y = torch.empty_like(x, dtype=dtype)
    num_rows = x.numel() // len(weight)
    options = _options(len(weight), is_offset)
    if num_rows:
        _norm_forward[(triton.cdiv(num_rows, options["TILE"]),)](
            x, x if delta is None else delta.contiguous(), weight.contiguous(), total, y,
            num_rows, eps, IS_SUM=delta is not None, **options,
        )  # fmt: skip
    return total, y


def _backward(
    grad_y: Tensor,
    grad_total: Tensor | None,
    x: Tensor,
    weight: Tensor,
    eps: float,
    is_offset: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients for x, `grad_total` from its other uses added, and for the weight."""
    options = _options(len(weight), is_offset)
    num_elements = options["TILE"] * options["BLOCK"]
    options["num_warps"] = max(2, num_elements // BACKWARD_ELEMENTS_PER_WARP)
    num_rows = x.numel() // len(weight)
    num_tiles = triton.cdiv(num_rows, options["TILE"])
    tiles_each = max(1, triton.cdiv(num_tiles, MAX_PARTIAL_SUMS))
    num_programs = triton.cdiv(num_tiles, tiles_each)
    grad_x = torch.empty_like(x)
    partial = x.new_empty((num_programs, len(weight)), dtype=torch.float32)
    if num_programs:
        _norm_backward[(num_programs,)](
            grad_y.contiguous(), grad_x if grad_total is None else grad_total.contiguous(),
            x, weight.contiguous(), grad_x, partial, num_rows, tiles_each, eps,
            HAS_TOTAL=grad_total is not None, **options,
        )  # fmt: skip
    return grad_x, partial.sum(0).to(weight.dtype)


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
    x, delta, weight, total, y, num_rows, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, IS_OFFSET: tl.constexpr,
    IS_SUM: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    columns = tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]
    offsets = rows[:, None] * WIDTH + columns[None, :]
    x_tile = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    if IS_SUM:
        x_tile += tl.load(delta + offsets, mask=mask, other=0.0).to(tl.float32)
        rounded = x_tile.to(total.dtype.element_ty)
        tl.store(total + offsets, rounded, mask=mask)
        x_tile = rounded.to(tl.float32)
    w = tl.load(weight + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    normed, _ = _normed(x_tile, eps, WIDTH)
    if IS_OFFSET:
        result = normed * (1 + w)[None, :]
    else:
        result = normed.to(x.dtype.element_ty).to(tl.float32) * w[None, :]
    tl.store(y + offsets, result.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _norm_backward(
    grad_y, grad_total, x, weight, grad_x, partial, num_rows, tiles_each, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, IS_OFFSET: tl.constexpr,
    HAS_TOTAL: tl.constexpr,
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
        offsets = rows[:, None] * WIDTH + columns[None, :]
        x_tile = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_y + offsets, mask=mask, other=0.0).to(tl.float32)
        normed, inverse = _normed(x_tile, eps, WIDTH)
        grad_normed = grad * w[None, :]
        along = tl.sum(grad_normed * normed, 1) / WIDTH
        result = (grad_normed - normed * along[:, None]) * inverse[:, None]
        if HAS_TOTAL:
            result += tl.load(grad_total + offsets, mask=mask, other=0.0).to(tl.float32)
        tl.store(grad_x + offsets, result.to(grad_x.dtype.element_ty), mask=mask)
        if not IS_OFFSET:
            normed = normed.to(x.dtype.element_ty).to(tl.float32)
        grad_weight += tl.sum(grad * normed, 0)
    tl.store(partial + program * WIDTH + columns, grad_weight, mask=is_column)

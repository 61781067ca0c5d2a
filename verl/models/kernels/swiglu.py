"""The gate of a feed-forward layer, act(gate) * up, forward and backward. Triton.

`act` is x sigmoid(x) (silu), or with `is_gelu` x sigmoid(2 u), u = sqrt(2/pi) (x + 0.044715 x^3),
which is the tanh form of gelu. The activation is computed in fp32 and rounded before the product,
as torch does. Only gate and up are kept for the backward pass. With `gated_down` that is true of
the layer behind the gate too: its input is made again while the gradients are written.
"""

# Types know neither `kernel[grid](...)` nor `once_differentiable`.
# pyright: reportIndexIssue=false, reportIncompatibleMethodOverride=false

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK = 1024
GELU_SLOPE = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi)
GELU_CUBIC = tl.constexpr(0.044715)


def gated(gate: Tensor, up: Tensor, *, is_gelu: bool = False) -> Tensor:
    """act(gate) * up for two tensors of one shape and dtype."""
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"gate is {tuple(gate.shape)} {gate.dtype}, up is {tuple(up.shape)} {up.dtype}; "
            "they must have one shape and one dtype"
        )
    return _Gated.apply(gate, up, is_gelu)  # pyright: ignore[reportReturnType]


def reference_gated(gate: Tensor, up: Tensor, *, is_gelu: bool = False) -> Tensor:
    """The same in plain torch."""
    return (F.gelu(gate, approximate="tanh") if is_gelu else F.silu(gate)) * up


def gated_halves(both: Tensor, *, is_gelu: bool = False) -> Tensor:
    """act(gate) * up where gate and up are the halves of each row of `both`, (..., 2 n)."""
    return _GatedHalves.apply(both, is_gelu)  # pyright: ignore[reportReturnType]


def gated_down(both: Tensor, weight: Tensor, *, is_gelu: bool = False) -> Tensor:
    """gated_halves(both) @ weight.t(), keeping `both` alone until the backward pass."""
    return _GatedDown.apply(both, weight, is_gelu)  # pyright: ignore[reportReturnType]


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, is_gelu: bool) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        y = torch.empty_like(gate)
        _launch(_gate_forward, (_rows(gate), _rows(up), _rows(y)), is_gelu)
        ctx.save_for_backward(gate, up)
        ctx.is_gelu = is_gelu
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        grads = torch.empty_like(gate), torch.empty_like(up)
        tensors = (gradients[0].contiguous(), gate, up, *grads, grads[0])
        _launch(_gate_backward, tuple(_rows(x) for x in tensors), ctx.is_gelu, WRITES_Y=False)
        return *grads, None


class _GatedHalves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both: Tensor, is_gelu: bool) -> Tensor:
        both, y = _halves_forward(both, is_gelu)
        ctx.save_for_backward(both)
        ctx.is_gelu = is_gelu
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (both,) = ctx.saved_tensors
        return _halves_backward(both, gradients[0], None, ctx.is_gelu), None


class _GatedDown(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both: Tensor, weight: Tensor, is_gelu: bool) -> Tensor:
        both, y = _halves_forward(both, is_gelu)
        ctx.save_for_backward(both, weight)
        ctx.is_gelu = is_gelu
        return F.linear(y, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        both, weight = ctx.saved_tensors
        (grad,) = gradients
        is_trained = ctx.needs_input_grad[1]
        y = both.new_empty(*both.shape[:-1], both.shape[-1] // 2) if is_trained else None
        grad_both = _halves_backward(both, grad @ weight, y, ctx.is_gelu)
        grad_weight = None if y is None else _rows(grad).t() @ _rows(y)
        return grad_both, grad_weight, None


def _halves_forward(both: Tensor, is_gelu: bool) -> tuple[Tensor, Tensor]:
    """`both`, contiguous, and act(gate) * up."""
    both = both.contiguous()
    y = both.new_empty(*both.shape[:-1], both.shape[-1] // 2)
    _launch(_gate_forward, (*_rows(both).chunk(2, -1), _rows(y)), is_gelu)
    return both, y


def _halves_backward(both: Tensor, grad_y: Tensor, y: Tensor | None, is_gelu: bool) -> Tensor:
    """The gradient for `both`; `y`, if given, becomes act(gate) * up again."""
    grad = torch.empty_like(both)
    halves = (*_rows(both).chunk(2, -1), *_rows(grad).chunk(2, -1))
    target = halves[-1] if y is None else _rows(y)
    tensors = (_rows(grad_y.contiguous()), *halves, target)
    _launch(_gate_backward, tensors, is_gelu, WRITES_Y=y is not None)
    return grad


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]) if x.dim() else x.reshape(1, 1)


def _launch(kernel: Any, tensors: tuple[Tensor, ...], is_gelu: bool, **options: bool) -> None:
    """Over tensors (rows, n), each with a step of its own from row to row."""
    num_rows, width = tensors[0].shape
    if num_rows and width:
        kernel[(num_rows, triton.cdiv(width, BLOCK))](
            *tensors, *(x.stride(0) for x in tensors), width,
            BLOCK=BLOCK, IS_GELU=is_gelu, num_warps=4, **options,
        )  # fmt: skip


@triton.jit
def _activation(x, IS_GELU: tl.constexpr):
    """act(x) and its derivative for x in fp32."""
    if IS_GELU:
        share = tl.sigmoid(GELU_SLOPE * (x + GELU_CUBIC * x * x * x))
        inner = GELU_SLOPE * (1 + 3 * GELU_CUBIC * x * x)
    else:
        share = tl.sigmoid(x)
        inner = 1.0
    return x * share, share + x * share * (1 - share) * inner


@triton.jit
def _gate_forward(
    gate, up, y, gate_step, up_step, y_step, width, BLOCK: tl.constexpr, IS_GELU: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    g = tl.load(gate + row * gate_step + columns, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_step + columns, mask=mask, other=0.0).to(tl.float32)
    active, _ = _activation(g, IS_GELU)
    active = active.to(gate.dtype.element_ty).to(tl.float32)
    tl.store(y + row * y_step + columns, (active * u).to(y.dtype.element_ty), mask=mask)


@triton.jit
def _gate_backward(
    grad_y, gate, up, grad_gate, grad_up, y,
    grad_y_step, gate_step, up_step, grad_gate_step, grad_up_step, y_step, width,
    BLOCK: tl.constexpr, IS_GELU: tl.constexpr, WRITES_Y: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    grad = tl.load(grad_y + row * grad_y_step + columns, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(gate + row * gate_step + columns, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_step + columns, mask=mask, other=0.0).to(tl.float32)
    active, slope = _activation(g, IS_GELU)
    active = active.to(gate.dtype.element_ty).to(tl.float32)
    for_up = (grad * active).to(grad_up.dtype.element_ty)
    tl.store(grad_up + row * grad_up_step + columns, for_up, mask=mask)
    for_gate = (grad * u * slope).to(grad_gate.dtype.element_ty)
    tl.store(grad_gate + row * grad_gate_step + columns, for_gate, mask=mask)
    if WRITES_Y:
        tl.store(y + row * y_step + columns, (active * u).to(y.dtype.element_ty), mask=mask)

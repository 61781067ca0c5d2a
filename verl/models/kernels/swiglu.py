"""The gate of a feed-forward layer, act(gate) * up, forward and backward. Triton.

`act` is x sigmoid(x) (silu), or with `is_gelu` x sigmoid(2 u), u = sqrt(2/pi) (x + 0.044715 x^3),
which is the tanh form of gelu. The activation is computed in fp32 and rounded before the product,
as torch does. Only gate and up are kept for the backward pass.
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


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, is_gelu: bool) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        y = torch.empty_like(gate)
        if y.numel():
            _forward[(triton.cdiv(y.numel(), BLOCK),)](
                gate, up, y, y.numel(), BLOCK=BLOCK, IS_GELU=is_gelu, num_warps=4
            )
        ctx.save_for_backward(gate, up)
        ctx.is_gelu = is_gelu
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        if gate.numel():
            _backward[(triton.cdiv(gate.numel(), BLOCK),)](
                gradients[0].contiguous(), gate, up, grad_gate, grad_up, gate.numel(),
                BLOCK=BLOCK, IS_GELU=ctx.is_gelu, num_warps=4,
            )  # fmt: skip
        return grad_gate, grad_up, None


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
def _forward(gate, up, y, num_elements, BLOCK: tl.constexpr, IS_GELU: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = places < num_elements
    g = tl.load(gate + places, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + places, mask=mask, other=0.0).to(tl.float32)
    active, _ = _activation(g, IS_GELU)
    active = active.to(gate.dtype.element_ty).to(tl.float32)
    tl.store(y + places, (active * u).to(y.dtype.element_ty), mask=mask)


@triton.jit
def _backward(
    grad_y, gate, up, grad_gate, grad_up, num_elements,
    BLOCK: tl.constexpr, IS_GELU: tl.constexpr,
):  # fmt: skip
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = places < num_elements
    grad = tl.load(grad_y + places, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(gate + places, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + places, mask=mask, other=0.0).to(tl.float32)
    active, slope = _activation(g, IS_GELU)
    active = active.to(gate.dtype.element_ty).to(tl.float32)
    tl.store(grad_up + places, (grad * active).to(grad_up.dtype.element_ty), mask=mask)
    tl.store(grad_gate + places, (grad * u * slope).to(grad_gate.dtype.element_ty), mask=mask)

"""Token and rotary position embeddings, forward and backward. Triton.

torch's backward of a token embedding counts the different tokens on the host, so the host stands
still until everything before has run, and then the device until the host has caught up. Here tokens
are sorted, and the program of the first of equal tokens adds up the gradients of all of them in
fp32, in their order: the sum does not depend on which program runs first.

    y = x cos + rotate_half(x) sin        rotate_half((a, b)) = (-b, a), a and b halves of a head

Queries and keys are rotated in one kernel; the backward pass is the transposed rotation, the same
kernel with two signs changed. A program takes one token with all its heads, so cos and sin are read
once. Products and sums are rounded where torch rounds: the result has the bits of the formula.
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

COLUMNS = 512
ROWS = 16
"""Tokens of which a program reads the gradients together."""


def embedding(ids: Tensor, weight: Tensor, *, padding_id: int | None = None) -> Tensor:
    """Rows of `weight` (V, width) for `ids` of any shape; that of `padding_id` gets no gradient."""
    return _Embedding.apply(ids, weight, padding_id)  # pyright: ignore[reportReturnType]


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, padding_id: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.shape, ctx.padding_id = weight.shape, padding_id
        return F.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        width = ctx.shape[1]
        rows = gradients[0].contiguous().view(-1, width)
        ordered, order = ids.flatten().sort(stable=True)
        result = rows.new_zeros(ctx.shape)
        if len(rows):
            _add_up_equal[(len(rows), triton.cdiv(width, COLUMNS))](
                rows, ordered, order, result, len(rows),
                -1 if ctx.padding_id is None else ctx.padding_id,
                WIDTH=width, COLUMNS=COLUMNS, ROWS=ROWS, num_warps=4,
            )  # fmt: skip
        return None, result, None


@triton.jit
def _add_up_equal(
    rows, ordered, order, result, num_rows, padding_id,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0)
    token = tl.load(ordered + first)
    before = tl.load(ordered + first - 1, mask=first > 0, other=-1)
    if (token != before) & (token != padding_id):
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        is_column = columns < WIDTH
        total = tl.zeros([COLUMNS], tl.float32)
        index, is_more = first, True
        while is_more:
            indices = index + tl.arange(0, ROWS)
            is_row = indices < num_rows
            is_equal = tl.load(ordered + indices, mask=is_row, other=-1) == token
            source = tl.load(order + indices, mask=is_row, other=0)
            part = tl.load(
                rows + source[:, None] * WIDTH + columns[None, :],
                mask=is_equal[:, None] & is_column[None, :],
                other=0.0,
            )
            total += tl.sum(part.to(tl.float32), 0)
            index += ROWS
            is_more = tl.sum(is_equal.to(tl.int32), 0) == ROWS
        target = result + token * WIDTH + columns
        tl.store(target, total.to(result.dtype.element_ty), mask=is_column)


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate q (1, heads, N, D) and k (1, KV heads, N, D) by cos and sin (1, N, D)."""
    problem = misfit(q, k, cos, sin)
    if problem is not None:
        raise ValueError(problem)
    return _Rotary.apply(q, k, cos, sin)  # pyright: ignore[reportReturnType]


def reference_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The same in plain torch."""
    return _reference_rotated(q, cos, sin), _reference_rotated(k, cos, sin)


def _reference_rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]


def misfit(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> str | None:
    """Why the kernel does not take these tensors; None when it does."""
    rule = None
    if q.dim() != 4 or k.dim() != 4 or q.shape[0] != 1 or k.shape[0] != 1:
        rule = "q and k must be (1, heads, tokens, head_dim)"
    elif q.shape[2:] != k.shape[2:] or q.shape[3] % 2:
        rule = "q and k must have the same tokens and the same even head_dim"
    elif cos.shape != (1, *q.shape[2:]) or sin.shape != cos.shape:
        rule = "cos and sin must be (1, tokens, head_dim), one value for each of q's elements"
    elif not q.dtype == k.dtype == cos.dtype == sin.dtype:
        rule = "they must have one dtype"
    elif cos.requires_grad or sin.requires_grad:
        rule = "cos and sin get no gradient here, so they must not need one"
    if rule is None:
        return None
    tensors = {"q": q, "k": k, "cos": cos, "sin": sin}
    shown = ", ".join(f"{name} {tuple(x.shape)} {x.dtype}" for name, x in tensors.items())
    return f"{shown}; {rule}"


@triton.jit
def _rotate(
    q, k, cos, sin, q_out, k_out,
    q_head, q_token, k_head, k_token,
    q_out_head, q_out_token, k_out_head, k_out_token,
    Q_HEADS: tl.constexpr, Q_PADDED: tl.constexpr,
    K_HEADS: tl.constexpr, K_PADDED: tl.constexpr,
    HALF: tl.constexpr, HALF_PADDED: tl.constexpr, IS_BACKWARD: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, HALF_PADDED)
    is_column = columns < HALF
    cos_a = cos + token * HALF * 2 + columns
    sin_a = sin + token * HALF * 2 + columns
    c_a = tl.load(cos_a, mask=is_column, other=0.0).to(tl.float32)[None, :]
    c_b = tl.load(cos_a + HALF, mask=is_column, other=0.0).to(tl.float32)[None, :]
    s_a = tl.load(sin_a, mask=is_column, other=0.0).to(tl.float32)[None, :]
    s_b = tl.load(sin_a + HALF, mask=is_column, other=0.0).to(tl.float32)[None, :]
    _rotate_heads(
        q + token * q_token, q_out + token * q_out_token, q_head, q_out_head, c_a, c_b, s_a, s_b,
        Q_HEADS, Q_PADDED, HALF, HALF_PADDED, IS_BACKWARD,
    )  # fmt: skip
    _rotate_heads(
        k + token * k_token, k_out + token * k_out_token, k_head, k_out_head, c_a, c_b, s_a, s_b,
        K_HEADS, K_PADDED, HALF, HALF_PADDED, IS_BACKWARD,
    )  # fmt: skip


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        return _launch(q, k, cos, sin, is_backward=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return *_launch(*gradients, *ctx.saved_tensors, is_backward=True), None, None


def _launch(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, is_backward: bool
) -> tuple[Tensor, Tensor]:
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)
    num_tokens, head_dim = q.shape[2:]
    if num_tokens:
        _rotate[(num_tokens,)](
            q, k, cos, sin, q_out, k_out,
            *q.stride()[1:3], *k.stride()[1:3], *q_out.stride()[1:3], *k_out.stride()[1:3],
            Q_HEADS=q.shape[1],
            Q_PADDED=triton.next_power_of_2(q.shape[1]),
            K_HEADS=k.shape[1],
            K_PADDED=triton.next_power_of_2(k.shape[1]),
            HALF=head_dim // 2,
            HALF_PADDED=triton.next_power_of_2(head_dim // 2),
            IS_BACKWARD=is_backward,
            num_warps=4,
            enable_fp_fusion=False,
        )  # fmt: skip
    return q_out, k_out


@triton.jit
def _rotate_heads(
    x, y, x_head, y_head, cos_a, cos_b, sin_a, sin_b,
    HEADS: tl.constexpr, PADDED: tl.constexpr, HALF: tl.constexpr, HALF_PADDED: tl.constexpr,
    IS_BACKWARD: tl.constexpr,
):  # fmt: skip
    """Rotate all heads of the token at `x`; a is the first half of a head, b the second."""
    heads = tl.arange(0, PADDED)[:, None].to(tl.int64)
    columns = tl.arange(0, HALF_PADDED)[None, :]
    mask = (heads < HEADS) & (columns < HALF)
    x_pointers = x + heads * x_head + columns
    a = tl.load(x_pointers, mask=mask, other=0.0)
    b = tl.load(x_pointers + HALF, mask=mask, other=0.0)
    if IS_BACKWARD:
        y_a = _rounded(a, cos_a) + _rounded(b, sin_b)
        y_b = _rounded(b, cos_b) - _rounded(a, sin_a)
    else:
        y_a = _rounded(a, cos_a) - _rounded(b, sin_a)
        y_b = _rounded(b, cos_b) + _rounded(a, sin_b)
    y_pointers = y + heads * y_head + columns
    tl.store(y_pointers, y_a.to(y.dtype.element_ty), mask=mask)
    tl.store(y_pointers + HALF, y_b.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _rounded(x, factor):
    """The product as torch leaves it in x's dtype, in fp32 to go on with."""
    return (x.to(tl.float32) * factor).to(x.dtype).to(tl.float32)

"""Looking tokens up, with a backward pass that never waits for the device. Triton.

torch's own counts the different tokens on the host, so the host stands still until everything
before has run, and the device then stands still until the host has caught up. Here tokens are
sorted, and the program of the first of equal tokens adds up the gradients of all of them in fp32,
in their order: the sum does not depend on which program runs first.
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
        place, is_more = first, True
        while is_more:
            places = place + tl.arange(0, ROWS)
            is_place = places < num_rows
            is_equal = tl.load(ordered + places, mask=is_place, other=-1) == token
            source = tl.load(order + places, mask=is_place, other=0)
            part = tl.load(
                rows + source[:, None] * WIDTH + columns[None, :],
                mask=is_equal[:, None] & is_column[None, :],
                other=0.0,
            )
            total += tl.sum(part.to(tl.float32), 0)
            place += ROWS
            is_more = tl.sum(is_equal.to(tl.int32), 0) == ROWS
        target = result + token * WIDTH + columns
        tl.store(target, total.to(result.dtype.element_ty), mask=is_column)

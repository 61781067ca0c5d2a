"""Rows to e4m3 with a scale of their own, in one launch. Triton.

The reference in plain torch is `fp8.reference_quantize_rows`.
"""

# Types do not know `kernel[grid](...)`.
# pyright: reportIndexIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
LARGEST = tl.constexpr(448.0)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (n, k) as e4m3, and the scale of each row, (n, 1) in fp32."""
    x = x.contiguous()
    num_rows, width = x.shape
    y = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(num_rows, 1, device=x.device)
    if num_rows:
        block = min(BLOCK, triton.next_power_of_2(width))
        _quantize[(num_rows,)](x, y, scale, width, BLOCK=block, num_warps=4)
    return y, scale


@triton.jit
def _quantize(x, y, scale, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, width, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        value = tl.load(x + row * width + columns, mask=columns < width, other=0.0)
        largest = tl.maximum(largest, tl.abs(value.to(tl.float32)))
    factor = tl.div_rn(tl.maximum(tl.max(largest), 1e-12), LARGEST)
    tl.store(scale + row, factor)
    for first in range(0, width, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        mask = columns < width
        value = tl.load(x + row * width + columns, mask=mask, other=0.0).to(tl.float32)
        value = tl.div_rn(value, factor)  # `/` is approximate: ties would fall to either side
        value = tl.minimum(tl.maximum(value, -LARGEST), LARGEST)
        tl.store(y + row * width + columns, value.to(tl.float8e4nv), mask=mask)

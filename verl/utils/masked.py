"""Sums, means and variances over the positions that a mask keeps.

Values outside the mask may be anything, NaN included: they never reach the result. No function
reads a count back from the device, and none divides by zero.
"""

import torch
from torch import Tensor

Axis = int | tuple[int, ...] | None


def masked_sum(values: Tensor, mask: Tensor, axis: Axis = None) -> Tensor:
    """Sum of `values * mask`; where the mask is 0 the value is not looked at."""
    kept = torch.where(mask.bool(), values, 0) * mask
    return kept.sum() if axis is None else kept.sum(axis)


def masked_mean(values: Tensor, mask: Tensor, axis: Axis = None) -> Tensor:
    """`masked_sum / (sum(mask) + 1e-8)`: an empty mask gives 0, not NaN."""
    count = mask.sum() if axis is None else mask.sum(axis)
    return masked_sum(values, mask, axis) / (count + 1e-8)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Variance over all kept positions, with Bessel's correction n / (n - 1) if `unbiased`.

    Fewer than two kept values have no spread: their variance is 0.
    """
    squares = (values - masked_mean(values, mask)) ** 2
    variance = masked_mean(squares, mask)
    if not unbiased:
        return variance
    count = mask.sum()
    correction = count / (count - 1).clamp(min=1)
    return torch.where(count > 1, variance * correction, torch.zeros_like(variance))


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Give the kept values mean 0 and variance 1; without `shift_mean` the mean is kept.

        (x - mean) / sqrt(var + 1e-8)   [+ mean]        var is unbiased

    A single kept value is its own mean, so it whitens to 0 (to itself without `shift_mean`).
    Positions outside the mask hold numbers of no meaning.
    """
    mean, variance = masked_mean(values, mask), masked_var(values, mask)
    whitened = (values - mean) * torch.rsqrt(variance + 1e-8)
    whitened = torch.where(mask.sum() > 1, whitened, torch.zeros_like(whitened))
    return whitened if shift_mean else whitened + mean

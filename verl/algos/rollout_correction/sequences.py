"""Sums over sequences and short summaries, for ratios that are compared token by token.

Only sequences with a kept token count; everything outside the mask is ignored.
"""

import torch
from torch import Tensor

from verl.utils.torch_functional import masked_sum

LOG_RATIO_LIMIT = 20.0


def sequence_sum(values: Tensor, mask: Tensor) -> Tensor:
    """(B, T) to (B, 1)."""
    return masked_sum(values, mask, -1)[:, None]


def sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """(B, T) to (B, 1); 0 for a sequence without a token."""
    return sequence_sum(values, mask) / mask.sum(-1, keepdim=True).clamp(min=1)


def sequence_max(values: Tensor, mask: Tensor) -> Tensor:
    """(B, T) to (B, 1); -inf for a sequence without a token."""
    return torch.where(mask.bool(), values, -torch.inf).amax(-1, keepdim=True)


def safe_exp(log_values: Tensor) -> Tensor:
    """exp within e^-20 and e^20: finite, and far outside any threshold in use."""
    return log_values.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def kept_tokens(values: Tensor, mask: Tensor) -> Tensor:
    """(B, T) to (number of tokens,)."""
    return values[mask.bool()]


def kept_sequences(values: Tensor, mask: Tensor) -> Tensor:
    """(B, 1) to (number of sequences with a token,)."""
    return values[:, 0][mask.bool().any(-1)]


def spread(values: Tensor, prefix: str) -> dict[str, Tensor]:
    """Mean, max, min and (population) standard deviation of at least one value."""
    return {
        f"{prefix}mean": values.mean(),
        f"{prefix}max": values.max(),
        f"{prefix}min": values.min(),
        f"{prefix}std": values.std(correction=0),
    }


def fraction(flags: Tensor) -> Tensor:
    return flags.double().mean()


def as_floats(metrics: dict[str, Tensor]) -> dict[str, float]:
    """Read all metrics from the device at once."""
    if not metrics:
        return {}
    values = torch.stack([value.detach().double() for value in metrics.values()])
    return dict(zip(metrics, values.tolist(), strict=True))

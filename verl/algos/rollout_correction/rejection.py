"""Rejection: tokens or sequences on which the two policies disagree too much are not trained on.

Each criterion keeps or rejects; what any of them rejects leaves the response mask. Ratios are
r = pi_train / pi_rollout, and k1 bounds apply to r itself.
"""

import torch
from torch import Tensor

from verl.algos.rollout_correction.criteria import Criterion, parse_criteria
from verl.algos.rollout_correction.sequences import (
    as_floats,
    fraction,
    kept_sequences,
    kept_tokens,
    safe_exp,
    sequence_max,
    sequence_mean,
    sequence_sum,
    spread,
)


def compute_rollout_rejection_mask(
    log_ratio: Tensor,
    response_mask: Tensor,
    rollout_rs: str = "token_k1",
    rollout_rs_threshold: str | float | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """The mask (B, T) of what every criterion keeps, and metrics.

    `log_ratio` is log pi_train/pi_rollout; the two strings are explained in `criteria`.
    """
    log_ratio = torch.where(response_mask.bool(), log_ratio.detach(), 0)
    mask, metrics = response_mask, {}
    for criterion in parse_criteria(rollout_rs, rollout_rs_threshold):
        value = statistic(criterion, log_ratio, response_mask)
        kept = (value >= criterion.lower) & (value <= criterion.upper)
        mask = mask * kept.to(mask.dtype)
        metrics |= _criterion_metrics(criterion, value, kept, response_mask)
    metrics |= _masked_fractions("rollout_rs_", mask.bool(), response_mask)
    return mask, as_floats(metrics)


def statistic(criterion: Criterion, log_ratio: Tensor, mask: Tensor) -> Tensor:
    """What the criterion bounds, for each token (B, T)."""
    if criterion.divergence == "k1":
        divergence = log_ratio
    elif criterion.divergence == "k2":
        divergence = log_ratio**2 / 2
    else:
        divergence = safe_exp(log_ratio) - 1 - log_ratio
    if criterion.level == "token":
        return divergence
    combine = {"seq_sum": sequence_sum, "seq_mean": sequence_mean, "seq_max": sequence_max}
    return combine[criterion.level](divergence, mask).expand_as(log_ratio)


def _criterion_metrics(
    criterion: Criterion, value: Tensor, kept: Tensor, mask: Tensor
) -> dict[str, Tensor]:
    """In the unit of the threshold: ratios for k1, the divergence itself for k2 and k3."""
    if not mask.any():
        return {}
    bounds = torch.tensor([criterion.lower, criterion.upper], dtype=torch.float64)
    if criterion.divergence == "k1":
        value, bounds = safe_exp(value), bounds.exp()
    low, high = bounds.tolist()
    tokens = kept_tokens(value, mask)
    sequences = kept_sequences(sequence_mean(value, mask), mask)
    prefix = f"rollout_rs_{criterion.option}_"
    neutral = 1.0 if criterion.divergence == "k1" else 0.0
    metrics = {
        **spread(tokens, prefix),
        f"{prefix}fraction_high": fraction(tokens > high),
        f"{prefix}fraction_low": fraction(tokens < low),
        **spread(sequences, f"{prefix}seq_"),
        f"{prefix}seq_max_deviation": (sequences - neutral).abs().max(),
        f"{prefix}seq_fraction_high": fraction(sequences > high),
        f"{prefix}seq_fraction_low": fraction(sequences < low),
    }
    return metrics | _masked_fractions(prefix, kept, mask)


def _masked_fractions(prefix: str, kept: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Of the tokens, how many were rejected; of the sequences, how many lost a token."""
    if not mask.any():
        return {}
    rejected = ~kept
    lost = (rejected & mask.bool()).any(-1, keepdim=True)
    return {
        f"{prefix}masked_fraction": fraction(kept_tokens(rejected, mask)),
        f"{prefix}seq_masked_fraction": fraction(kept_sequences(lost, mask)),
    }

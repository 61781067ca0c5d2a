"""Importance weights: how much more likely the training policy finds what the rollout sampled.

    token      w_it = r_it                 r = pi_train / pi_rollout
    sequence   w_it = prod_t r_it          the same for every token of a sequence

Truncated at a threshold (truncated importance sampling), which bounds the variance at the price of
a bias. The weights carry no gradient and multiply the policy loss.
"""

import torch
from torch import Tensor

from verl.algos.rollout_correction.sequences import (
    as_floats,
    fraction,
    kept_sequences,
    kept_tokens,
    safe_exp,
    sequence_mean,
    sequence_sum,
    spread,
)

IS_LEVELS = ("token", "sequence")


def compute_rollout_correction_weights(
    log_ratio: Tensor,
    response_mask: Tensor,
    rollout_is: str = "token",
    rollout_is_threshold: float = 2.0,
    rollout_is_batch_normalize: bool = False,
) -> tuple[Tensor, dict[str, float]]:
    """Weights (B, T), 0 outside the mask, and metrics, from `log_ratio` = log pi_train/pi_rollout.

    With `rollout_is_batch_normalize` the truncated weights are divided by their mean, over tokens
    or over sequences. The rows given must be the whole batch: no other process is asked.
    """
    if rollout_is not in IS_LEVELS:
        known = ", ".join(IS_LEVELS)
        raise ValueError(f"rollout_is is {rollout_is!r}; it must be null or one of: {known}")
    if not rollout_is_threshold > 0:
        raise ValueError(
            f"rollout_is_threshold is {rollout_is_threshold}; importance weights are truncated "
            "at it, so it must be greater than 0 (2.0 is usual)"
        )
    log_ratio = log_ratio.detach()
    if rollout_is == "sequence":
        log_ratio = sequence_sum(log_ratio, response_mask).expand_as(log_ratio)
    ratio = torch.where(response_mask.bool(), safe_exp(log_ratio), 0)
    weights = ratio.clamp(max=rollout_is_threshold)
    metrics = _weight_metrics(ratio, weights, response_mask, rollout_is_threshold)
    if rollout_is_batch_normalize and metrics:
        mean = _mean_weight(weights, response_mask, rollout_is)
        weights = weights / mean
        metrics["rollout_is_batch_norm_factor"] = mean
    return weights, as_floats(metrics)


def _mean_weight(weights: Tensor, mask: Tensor, rollout_is: str) -> Tensor:
    if rollout_is == "token":
        return kept_tokens(weights, mask).mean()
    return kept_sequences(sequence_mean(weights, mask), mask).mean()


def _weight_metrics(
    ratio: Tensor, weights: Tensor, mask: Tensor, threshold: float
) -> dict[str, Tensor]:
    """What the ratios are before truncation; the effective sample size is of the weights in use.

    Nothing can be said of a batch without a token.
    """
    if not mask.any():
        return {}
    tokens = kept_tokens(ratio, mask)
    sequences = kept_sequences(sequence_mean(ratio, mask), mask)
    used = kept_tokens(weights, mask)
    metrics = {
        **spread(tokens, ""),
        "eff_sample_size": used.mean() ** 2 / (used**2).mean(),
        "ratio_fraction_high": fraction(tokens > threshold),
        "ratio_fraction_low": fraction(tokens < 1 / threshold),
        **spread(sequences, "seq_"),
        "seq_max_deviation": (sequences - 1).abs().max(),
        "seq_fraction_high": fraction(sequences > threshold),
        "seq_fraction_low": fraction(sequences < 1 / threshold),
    }
    return {f"rollout_is_{name}": value for name, value in metrics.items()}

"""Weights, rejection and metrics together, on tensors: what both ways of applying them share."""

from torch import Tensor

from verl.algos.rollout_correction.metrics import compute_offpolicy_metrics, prefixed
from verl.algos.rollout_correction.rejection import compute_rollout_rejection_mask
from verl.algos.rollout_correction.weights import compute_rollout_correction_weights


def correct_rollout(
    log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    *,
    rollout_is: str | None,
    rollout_is_threshold: float,
    rollout_is_batch_normalize: bool,
    rollout_rs: str | None,
    rollout_rs_threshold: str | float | None,
) -> tuple[Tensor | None, Tensor, dict[str, float]]:
    """(weights or None, mask, metrics named `rollout_corr/*`); all tensors are (B, T).

    Nothing here has a gradient. The weights are of everything that was sampled, also of what the
    mask then rejects.
    """
    log_prob = log_prob.detach()
    log_ratio = log_prob - rollout_log_prob
    metrics = compute_offpolicy_metrics(log_prob, rollout_log_prob, response_mask)
    weights, mask = None, response_mask
    if rollout_is is not None:
        weights, found = compute_rollout_correction_weights(
            log_ratio, response_mask, rollout_is, rollout_is_threshold, rollout_is_batch_normalize
        )
        metrics |= found
    if rollout_rs is not None:
        mask, found = compute_rollout_rejection_mask(
            log_ratio, response_mask, rollout_rs, rollout_rs_threshold
        )
        metrics |= found
    return weights, mask, prefixed(metrics)

"""Rollout correction: what to do when the policy that sampled is not quite the one that is trained.

Importance weights, rejection of what differs too much and measures of the difference
(`correction`), the two ways to use them in training (`apply`), and the age of tokens where older
policies sampled some of them (`off_policy`).
"""

from verl.algos.rollout_correction.apply import (
    apply_bypass_mode,
    compute_rollout_correction_and_add_to_batch,
    compute_rollout_correction_and_rejection_mask,
)
from verl.algos.rollout_correction.correction import (
    SUPPORTED_ROLLOUT_RS_OPTIONS,
    compute_offpolicy_metrics,
    compute_rollout_corr_metrics_from_logprobs,
    compute_rollout_correction_weights,
    compute_rollout_rejection_mask,
)
from verl.algos.rollout_correction.off_policy import off_policy_metrics, reject_stale, token_ages

__all__ = [
    "SUPPORTED_ROLLOUT_RS_OPTIONS",
    "apply_bypass_mode",
    "compute_offpolicy_metrics",
    "compute_rollout_corr_metrics_from_logprobs",
    "compute_rollout_correction_and_add_to_batch",
    "compute_rollout_correction_and_rejection_mask",
    "compute_rollout_correction_weights",
    "compute_rollout_rejection_mask",
    "off_policy_metrics",
    "reject_stale",
    "token_ages",
]

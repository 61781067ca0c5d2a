"""Rollout correction: what to do when the policy that sampled is not quite the one that is trained.

Importance weights (`weights`), rejection of what differs too much (`rejection`, `criteria`),
measures of the difference (`metrics`), and the two ways to use them in training (`apply`).
"""

from verl.algos.rollout_correction.apply import (
    apply_bypass_mode,
    compute_rollout_correction_and_add_to_batch,
    compute_rollout_correction_and_rejection_mask,
)
from verl.algos.rollout_correction.criteria import SUPPORTED_ROLLOUT_RS_OPTIONS
from verl.algos.rollout_correction.metrics import (
    compute_offpolicy_metrics,
    compute_rollout_corr_metrics_from_logprobs,
)
from verl.algos.rollout_correction.rejection import compute_rollout_rejection_mask
from verl.algos.rollout_correction.weights import compute_rollout_correction_weights

__all__ = [
    "SUPPORTED_ROLLOUT_RS_OPTIONS",
    "apply_bypass_mode",
    "compute_offpolicy_metrics",
    "compute_rollout_corr_metrics_from_logprobs",
    "compute_rollout_correction_and_add_to_batch",
    "compute_rollout_correction_and_rejection_mask",
    "compute_rollout_correction_weights",
    "compute_rollout_rejection_mask",
]

"""Losses that compare whole sequences, where a session has several rows.

GSPO, GMPO and importance weights or rejection by sequence (bypass mode) need the ratios of all
tokens of a session, whose rows may be in different passes and on different ranks. All of it enters
without a gradient, or with one that is local to a token:

    GSPO   s_it = sg(s_i) pi_it / sg(pi_it)              s_i over the session
    GMPO   sum_t sg(F_i) (1 + c_it - sg(c_it)),          F_i = -mean(A) exp(mean_t c_it) w_i / n_i,
           which has the value n_i F_i and the gradient of -mean(A) exp(mean_t c_it) w_i

So log-probs of the policy at the start of the optimizer step are computed first, in a pass without
gradients, and what belongs to a session becomes columns of its rows.
"""

import torch
from torch import Tensor

from verl.algos.policy_losses.ppo import (
    clipped_log_ratio,
    compute_policy_loss_geo_mean,
    compute_policy_loss_gspo,
    geometric_mean,
    sequence_mean,
    without_rejected,
)
from verl.algos.policy_losses.reinforce import bypassed_loss
from verl.algos.policy_losses.terms import clip_range, log_ratio
from verl.algos.rollout_correction.correction import correct_rollout
from verl.algos.sessions import JoinedSessions
from verl.config.actor import ActorConfig

WHOLE_SEQUENCE_LOSSES = (compute_policy_loss_gspo, compute_policy_loss_geo_mean)


def compares_sequences(config: ActorConfig) -> bool:
    """Whether the loss needs all tokens of a sequence at once."""
    return bypassed_loss(config) in WHOLE_SEQUENCE_LOSSES or _corrects_sequences(config)


def _corrects_sequences(config: ActorConfig) -> bool:
    correction = config.policy_loss.rollout_correction
    if config.policy_loss.loss_mode != "bypass_mode" or correction is None:
        return False
    if bypassed_loss(config) is compute_policy_loss_geo_mean and correction.rollout_rs:
        return True  # its mean is over the tokens that are left
    has_weights = correction.rollout_is == "sequence" and correction.loss_type == "reinforce"
    return has_weights or "seq_" in (correction.rollout_rs or "")


def prepare_sessions(
    *,
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    session_index: Tensor,
    config: ActorConfig,
    rollout_is_weights: Tensor | None = None,
) -> dict[str, Tensor]:
    """Columns for the loss of `config`, from all rows of an optimizer step.

    Tensors are (B, T); `session_index` (B,) has the session of each row, and `log_prob` belongs to
    the policy at the start of the step.
    """
    numbers = torch.unique(session_index, return_inverse=True)[1]
    sessions = JoinedSessions(numbers, response_mask)
    mask = sessions.mask(response_mask)  # (S, W), as all that follows
    new, old = sessions.join(log_prob.detach()), sessions.join(old_log_prob.detach())
    weights = None if rollout_is_weights is None else sessions.join(rollout_is_weights)
    columns: dict[str, Tensor] = {}
    if _corrects_sequences(config):
        weights = _correction_weights(new, old, mask, config)
        columns["session_weights"] = sessions.cut(weights)
    loss_fn = bypassed_loss(config)
    if loss_fn is compute_policy_loss_gspo:
        columns["session_log_ratio"] = sequence_mean(log_ratio(new, old, mask), mask)[numbers]
    if loss_fn is compute_policy_loss_geo_mean:
        joined_advantages = sessions.join(advantages)
        clipped, _, _ = clipped_log_ratio(
            log_ratio(new, old, mask), joined_advantages, *clip_range(config)
        )
        kept = without_rejected(mask, weights)
        factor = -sequence_mean(joined_advantages, kept) * sequence_mean(clipped, kept).exp()
        if weights is not None:
            factor = factor * geometric_mean(weights, kept)
        columns["session_factor"] = (factor / kept.sum(-1).clamp(min=1))[numbers]
    return columns


def _correction_weights(new: Tensor, old: Tensor, mask: Tensor, config: ActorConfig) -> Tensor:
    """Weights and rejection together. `rollout_is_batch_normalize` divides by the mean weight of a
    session, or of a token, over the step: all its rows are here."""
    correction = config.policy_loss.rollout_correction
    assert correction is not None
    is_reinforce = correction.loss_type == "reinforce"
    weights, kept, _ = correct_rollout(
        new,
        old,
        mask,
        rollout_is=correction.rollout_is,
        rollout_is_threshold=correction.rollout_is_threshold,
        rollout_is_batch_normalize=is_reinforce and correction.rollout_is_batch_normalize,
        rollout_rs=correction.rollout_rs,
        rollout_rs_threshold=correction.rollout_rs_threshold,
    )
    kept = kept.to(new.dtype)
    return kept * weights if is_reinforce and weights is not None else kept

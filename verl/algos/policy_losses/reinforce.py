"""The plain policy gradient: GPG, REINFORCE with importance weights, and bypass mode.

In bypass mode the policy that sampled the tokens is the old policy; no other was computed.
Importance weights and rejection compare the current policy with the sampling one, so they are
computed here, from the log-probs of the very forward pass that is trained.

A rejected token or sequence is a sample of weight zero: it contributes nothing and stays in the
denominator. How many are kept is known only after the last micro-batch, so dividing by that number
would make the gradient depend on the micro-batches. (Where the correction is applied before the
update, the rejected tokens leave the mask and the denominators follow it.)
"""

from functools import partial

import torch
from torch import Tensor

from verl.algos.policy_losses.terms import aggregate, log_ratio, options, token_means
from verl.algos.registry import (
    PolicyLossFn,
    get_policy_loss_fn,
    loss_and_metrics,
    register_policy_loss,
)
from verl.algos.rollout_correction.correction import correct_rollout
from verl.config.actor import ActorConfig
from verl.config.algorithm import RolloutCorrectionConfig


def compute_policy_loss_reinforce(
    rollout_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-sum",
    config: ActorConfig | None = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """L = -w A log pi, with w = `rollout_is_weights` (1 if not given) and no clip.

    `ppo_kl` is measured against the policy that sampled the tokens. All tensors are (B, T).
    """
    loss = -advantages * torch.where(response_mask.bool(), log_prob, 0)
    divergence = -log_ratio(log_prob, rollout_log_prob, response_mask)
    metrics = token_means(response_mask, ppo_kl=divergence)
    return aggregate(loss, response_mask, loss_agg_mode, config, rollout_is_weights), metrics


@register_policy_loss("gpg", built_in=True)
def compute_policy_loss_gpg(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: ActorConfig | None = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Group policy gradient (arXiv:2504.02546): L = -A log pi. `old_log_prob` is not used."""
    loss = -advantages * torch.where(response_mask.bool(), log_prob, 0)
    return aggregate(loss, response_mask, loss_agg_mode, config, rollout_is_weights), {}


@register_policy_loss("bypass_mode", built_in=True)
def compute_policy_loss_bypass_mode(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: ActorConfig | None = None,
    rollout_is_weights: Tensor | None = None,
    session_weights: Tensor | None = None,
    **prepared: Tensor,
) -> tuple[Tensor, dict[str, Tensor | float]]:
    """The loss named by `rollout_correction.loss_type`; `old_log_prob` is the rollout's.

        ppo_clip    the loss that `loss_mode` chose (vanilla PPO, GSPO, CISPO, ...) with
                    r = pi / pi_rollout: the ratio is the importance weight, and those of
                    `rollout_is` are only reported
        reinforce   -w A log pi, w = the truncated importance weight (1 without `rollout_is`)

    The metrics of the correction describe the given rows. `session_weights` (B, T) are weights and
    rejection together where a sequence has more rows than these; `prepared` are columns of the loss
    that is made use of.
    """
    config = options(config)
    correction = _correction(config)
    if rollout_is_weights is not None:
        raise ValueError(
            "bypass mode computes its importance weights itself; leave rollout_is_weights at None"
        )
    is_reinforce = correction.loss_type == "reinforce"
    is_normalized = is_reinforce and correction.rollout_is_batch_normalize
    is_prepared = session_weights is not None  # by their mean over all rows of the step
    if is_normalized and not is_prepared:
        _refuse_part_of_a_batch(response_mask, config)
    correct = partial(corrected, correction=correction, normalizes=not is_prepared)
    weights, kept, metrics = correct(log_prob, old_log_prob, response_mask)
    if not response_mask.any():  # all passes report the same names
        one = torch.zeros(1, 1)
        metrics = dict.fromkeys(correct(one, one, one + 1)[2], 0.0)
    kept = kept.to(log_prob.dtype)
    applied = kept * weights if is_reinforce and weights is not None else kept
    returned = bypassed_loss(config)(
        old_log_prob,
        log_prob,
        advantages,
        response_mask,
        loss_agg_mode,
        config,
        rollout_is_weights=applied if session_weights is None else session_weights,
        **prepared,
    )
    loss, loss_metrics = loss_and_metrics(returned)
    return loss, {**loss_metrics, **metrics}


def corrected(
    log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    correction: RolloutCorrectionConfig,
    *,
    normalizes: bool = True,
) -> tuple[Tensor | None, Tensor, dict[str, float]]:
    """`correct_rollout` by the configuration; weights are normalised where they are applied, if
    these rows are all of the batch (`normalizes`)."""
    is_applied = normalizes and correction.loss_type == "reinforce"
    return correct_rollout(
        log_prob,
        rollout_log_prob,
        response_mask,
        rollout_is=correction.rollout_is,
        rollout_is_threshold=correction.rollout_is_threshold,
        rollout_is_batch_normalize=is_applied and correction.rollout_is_batch_normalize,
        rollout_rs=correction.rollout_rs,
        rollout_rs_threshold=correction.rollout_rs_threshold,
    )


def bypassed_loss(config: ActorConfig) -> PolicyLossFn:
    """The loss on the ratio to the policy that sampled: in bypass mode the one it is made of, else
    the one that is chosen."""
    loss = config.policy_loss
    if loss.loss_mode != "bypass_mode":
        return get_policy_loss_fn(loss.loss_mode)
    if _correction(config).loss_type == "reinforce":
        return compute_policy_loss_reinforce
    return get_policy_loss_fn(loss.bypassed_loss_mode)


def _correction(config: ActorConfig) -> RolloutCorrectionConfig:
    correction = config.policy_loss.rollout_correction
    if correction is None:
        raise ValueError(
            "the policy loss bypass_mode reads policy_loss.rollout_correction, which is not set; "
            "choose it by algorithm.rollout_correction.bypass_mode=True, not by loss_mode"
        )
    return correction


def _refuse_part_of_a_batch(response_mask: Tensor, config: ActorConfig) -> None:
    """The mean weight of a batch cannot be known from some of its rows."""
    given, counts = int(response_mask.sum()), config.global_batch_info
    total = counts.get("batch_num_tokens")
    if total is not None and int(total) != given:
        raise ValueError(
            "rollout_correction.rollout_is_batch_normalize divides by the mean weight of the whole "
            f"mini-batch ({int(total)} tokens), which bypass mode cannot know in a micro-batch "
            f"({given} tokens); set bypass_mode=False, or rollout_is_batch_normalize=False"
        )

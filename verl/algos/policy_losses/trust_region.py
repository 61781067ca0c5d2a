"""Losses that bound the policy's change by something other than its ratio: DPPO and DRO.

DPPO masks a token once a divergence of the whole distribution, estimated from the sampled token,
is beyond its bound; ratios of rare tokens may move far. DRO has no mask and no ratio: it pulls
log-probs back by a square.
"""

import torch
from torch import Tensor

from verl.algos.policy_losses.terms import aggregate, clip_range, log_ratio, options, token_means
from verl.algos.registry import register_policy_loss
from verl.config.actor import ActorConfig


@register_policy_loss("dppo_tv", built_in=True)
def compute_policy_loss_dppo_tv(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: ActorConfig | None = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Divergence PPO (arXiv:2602.04879) with the total variation of "this token or another".

        D = |pi - pi_old|
        L = -A r M,     M = 0 where A > 0, r > 1, D > high, or A < 0, r < 1, D > low, else 1

    `low` and `high` are `clip_ratio_low` and `clip_ratio_high`, here bounds on D. A masked token
    stays in the denominator. `pg_clipfrac` is the fraction masked.
    """
    new, old = _as_log_probs(response_mask, log_prob.detach(), old_log_prob)
    divergence = (new.exp() - old.exp()).abs()
    return _divergence_masked(
        divergence,
        log_ratio(log_prob, old_log_prob, response_mask),
        advantages,
        response_mask,
        loss_agg_mode,
        options(config),
        rollout_is_weights,
    )


@register_policy_loss("dppo_kl", built_in=True)
def compute_policy_loss_dppo_kl(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: ActorConfig | None = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The same with the KL of "this token or another", old against new.

    D = pi_old log(pi_old / pi) + (1 - pi_old) log((1 - pi_old) / (1 - pi))
    """
    new, old = _as_log_probs(response_mask, log_prob.detach(), old_log_prob)
    others = -torch.expm1(old)  # 1 - pi_old
    smallest = torch.finfo(new.dtype).tiny
    log_others = others.clamp(min=smallest).log() - (-torch.expm1(new)).clamp(min=smallest).log()
    divergence = old.exp() * (old - new) + others * log_others
    return _divergence_masked(
        divergence,
        log_ratio(log_prob, old_log_prob, response_mask),
        advantages,
        response_mask,
        loss_agg_mode,
        options(config),
        rollout_is_weights,
    )


@register_policy_loss("dro", built_in=True)
def compute_policy_loss_dro(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: ActorConfig | None = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Direct reward optimization (arXiv:2405.19107), token by token.

        L = -A log pi + beta / 2 (log pi - log pi_old)^2        beta = `policy_loss.dro_beta`

    The paper's squared residual of reward, value and log-ratio has this gradient in the policy.
    `ppo_kl` is the mean of -log r.
    """
    beta = options(config).policy_loss.dro_beta
    if beta is None:
        raise ValueError("the policy loss dro needs policy_loss.dro_beta; 0.05 is usual")
    log_r = log_ratio(log_prob, old_log_prob, response_mask)
    penalty = log_r**2 / 2
    loss = -advantages * _masked(log_prob, response_mask) + beta * penalty
    metrics = token_means(response_mask, ppo_kl=-log_r, dro_penalty=penalty)
    return aggregate(loss, response_mask, loss_agg_mode, config, rollout_is_weights), metrics


def _masked(values: Tensor, response_mask: Tensor) -> Tensor:
    return torch.where(response_mask.bool(), values, 0)


def _as_log_probs(response_mask: Tensor, *values: Tensor) -> list[Tensor]:
    """0 outside the mask and at most 0 inside, where rounding may leave a little more."""
    return [_masked(value, response_mask).clamp(max=0) for value in values]


def _divergence_masked(
    divergence: Tensor,
    log_r: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: ActorConfig,
    rollout_is_weights: Tensor | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """-A r where the step does not lead further away than the bound."""
    low, high = clip_range(config)
    is_above = (advantages > 0) & (log_r > 0) & (divergence > high)
    is_below = (advantages < 0) & (log_r < 0) & (divergence > low)
    loss = torch.where(is_above | is_below, 0, -advantages * log_r.exp())
    metrics = token_means(
        response_mask,
        pg_clipfrac=is_above | is_below,
        ppo_kl=-log_r,
        pg_clipfrac_lower=is_below,
        dppo_divergence=divergence,
    )
    return aggregate(loss, response_mask, loss_agg_mode, config, rollout_is_weights), metrics

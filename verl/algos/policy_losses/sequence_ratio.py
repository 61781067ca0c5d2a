"""Losses with one ratio per sequence: GSPO and the geometric mean of token ratios (GMPO)."""

import torch
from torch import Tensor

from verl.algos.policy_losses.terms import (
    aggregate,
    clip_range,
    clipped_surrogate,
    log_ratio,
    options,
    token_means,
)
from verl.algos.registry import register_policy_loss
from verl.config.actor import ActorConfig
from verl.utils.torch_functional import masked_sum

LOG_SEQUENCE_RATIO_LIMIT = 10.0


@register_policy_loss("gspo", built_in=True)
def compute_policy_loss_gspo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    config: ActorConfig | None = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Group sequence policy optimization (arXiv:2507.18071).

        s_i = exp(1/n_i sum_t log r_it)          one ratio per sequence, normalised by its length
        L_it = max(-A s_it, -A clip(s_it, 1 - low, 1 + high))
        s_it = sg(s_i) pi_it / sg(pi_it)         the value of s_i, the gradient of token t

    sg stops the gradient; log s is at most 10. Sequences count alike whatever their length, so the
    aggregation is seq-mean-token-mean whatever `loss_agg_mode` says.
    """
    config = options(config)
    log_r = log_ratio(log_prob, old_log_prob, response_mask)
    lengths = response_mask.sum(-1).clamp(min=1)
    log_s = (masked_sum(log_r, response_mask, -1) / lengths).detach()  # (B,)
    kept_log_prob = torch.where(response_mask.bool(), log_prob, 0)
    log_s_token = kept_log_prob - kept_log_prob.detach() + log_s[:, None]  # (B, T)
    log_s_token = log_s_token.clamp(max=LOG_SEQUENCE_RATIO_LIMIT)
    loss, is_clipped = clipped_surrogate(log_s_token, advantages, *clip_range(config))
    metrics = token_means(
        response_mask,
        pg_clipfrac=is_clipped,
        ppo_kl=-log_r,
        pg_clipfrac_lower=torch.zeros_like(is_clipped),
    )
    loss = aggregate(loss, response_mask, "seq-mean-token-mean", config, rollout_is_weights)
    return loss, metrics


@register_policy_loss("geo_mean", built_in=True)
def compute_policy_loss_geo_mean(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: ActorConfig | None = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Geometric-mean policy optimization (arXiv:2507.20673).

        c_it = min(log r_it, high) where A > 0,  max(log r_it, -low) where A < 0
        L_i = -mean_t(A_it) exp(mean_t c_it)

    The bounds are on the logarithm of the ratio. The loss is the mean of L_i over the sequences of
    the whole mini-batch, whatever `loss_agg_mode` says. Of `rollout_is_weights` the geometric mean
    over the sequence is taken, which for sequence weights is the weight itself.
    """
    config = options(config)
    low, high = clip_range(config)
    log_r = log_ratio(log_prob, old_log_prob, response_mask)
    is_clipped_above = (advantages > 0) & (log_r > high)
    is_clipped_below = (advantages < 0) & (log_r < -low)
    clipped = torch.where(is_clipped_above, high, torch.where(is_clipped_below, -low, log_r))
    loss = -_sequence_mean(advantages, response_mask) * _sequence_mean(clipped, response_mask).exp()
    if rollout_is_weights is not None:
        loss = loss * _geometric_mean(rollout_is_weights.detach(), response_mask)
    metrics = token_means(
        response_mask,
        pg_clipfrac=is_clipped_above,
        ppo_kl=-log_r,
        pg_clipfrac_lower=is_clipped_below,
    )
    has_tokens = response_mask.any(-1, keepdim=True).to(loss.dtype)
    return aggregate(loss[:, None], has_tokens, "seq-mean-token-sum", config), metrics


def _sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """(B, T) to (B,); 0 for a sequence without a token."""
    return masked_sum(values, mask, -1) / mask.sum(-1).clamp(min=1)


def _geometric_mean(weights: Tensor, mask: Tensor) -> Tensor:
    smallest = torch.finfo(weights.dtype).tiny
    return _sequence_mean(weights.clamp(min=smallest).log(), mask).exp()

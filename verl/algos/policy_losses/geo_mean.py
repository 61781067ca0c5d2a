"""GMPO: each sequence counts with the geometric mean of its token ratios."""

import torch
from torch import Tensor

from verl.algos.policy_losses.terms import (
    aggregate,
    clip_range,
    log_ratio,
    options,
    token_means,
)
from verl.algos.registry import register_policy_loss
from verl.config.actor import ActorConfig
from verl.utils.torch_functional import masked_sum


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

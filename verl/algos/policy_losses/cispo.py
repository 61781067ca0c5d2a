"""CISPO: the ratio is a clipped weight, so that no token loses its gradient."""

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


@register_policy_loss("cispo", built_in=True)
def compute_policy_loss_cispo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: ActorConfig | None = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped importance-sampling policy optimization (arXiv:2506.13585).

        L = -sg(clip(r, 1 - low, 1 + high)) A log pi

    sg stops the gradient. `clip_ratio_low` of 1 or more leaves the weight free to fall to 0, which
    is how the method is meant to be used.
    """
    config = options(config)
    low, high = clip_range(config)
    log_r = log_ratio(log_prob, old_log_prob, response_mask)
    ratio = log_r.detach().exp()
    weight = ratio.clamp(1 - low, 1 + high)
    loss = -weight * advantages * torch.where(response_mask.bool(), log_prob, 0)
    metrics = token_means(
        response_mask,
        pg_clipfrac=weight != ratio,
        ppo_kl=-log_r,
        pg_clipfrac_lower=torch.zeros_like(ratio),
    )
    return aggregate(loss, response_mask, loss_agg_mode, config, rollout_is_weights), metrics

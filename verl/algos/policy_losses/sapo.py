"""SAPO: a smooth gate on the ratio in place of the hard clip."""

import torch
from torch import Tensor

from verl.algos.policy_losses.terms import aggregate, log_ratio, options, token_means
from verl.algos.registry import register_policy_loss
from verl.config.actor import ActorConfig


@register_policy_loss("sapo", built_in=True)
def compute_policy_loss_sapo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    config: ActorConfig | None = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Soft adaptive policy optimization (arXiv:2511.20347).

        L = -A 4/tau sigmoid(tau (r - 1)),   tau = tau_pos where A > 0, else tau_neg

    The slope in r is 1 at r = 1, as without a gate, and fades on both sides; a larger tau fades
    sooner. The aggregation is seq-mean-token-mean whatever `loss_agg_mode` says.
    """
    config = options(config)
    log_r = log_ratio(log_prob, old_log_prob, response_mask)
    tau = torch.where(advantages > 0, config.tau_pos, config.tau_neg).to(log_r.dtype)
    loss = -advantages * torch.sigmoid(tau * (log_r.exp() - 1)) * 4 / tau
    never = torch.zeros_like(log_r)
    metrics = token_means(response_mask, pg_clipfrac=never, ppo_kl=-log_r, pg_clipfrac_lower=never)
    loss = aggregate(loss, response_mask, "seq-mean-token-mean", config, rollout_is_weights)
    return loss, metrics

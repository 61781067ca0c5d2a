"""REINFORCE with explicit importance weights, the loss of bypass mode's `loss_type=reinforce`."""

import torch
from torch import Tensor

from verl.algos.policy_losses.terms import aggregate, log_ratio, token_means
from verl.config.actor import ActorConfig


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

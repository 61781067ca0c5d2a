"""Generalized advantage estimation: a critic's values bootstrap the return of every token."""

import torch
from torch import Tensor

from verl.algos.advantages.rewards import reward_of_trained_tokens, whiten
from verl.algos.registry import AdvantageEstimator, register_adv_est


@register_adv_est(AdvantageEstimator.GAE, built_in=True)
@torch.no_grad()
def compute_gae_advantage_return(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Exponentially weighted temporal differences (arXiv:1506.02438).

        delta_t  = r_t + gamma V_next - V_t
        A_t      = delta_t + gamma lam A_next
        return_t = A_t + V_t                            then A is whitened over the mask

    All tensors are (B, T). `next` is the next trained token: masked tokens (tool output, padding)
    are stepped over, so their values never bootstrap and they cost no discount; after the last
    trained token V and A are 0.
    """
    is_trained = response_mask.bool().T  # (T, B): one row per step of the recursion
    rewards = reward_of_trained_tokens(token_level_rewards, response_mask).T.contiguous()
    values = values.to(rewards.dtype).T.contiguous()
    advantages = torch.zeros_like(rewards)
    next_value = next_advantage = torch.zeros_like(rewards[0])
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * next_value - values[t]
        advantages[t] = delta + gamma * lam * next_advantage
        next_value = torch.where(is_trained[t], values[t], next_value)
        next_advantage = torch.where(is_trained[t], advantages[t], next_advantage)
    returns = torch.where(is_trained, advantages + values, 0.0).T.contiguous()
    return whiten(advantages.T, response_mask), returns

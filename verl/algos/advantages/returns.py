"""Rewards, returns, and the advantages that follow from the return of every token.

GAE lets a critic's values bootstrap the return, REINFORCE++ scales returns over the whole batch,
ReMax subtracts the reward of a greedy response. The helpers serve every estimator: all rewards are
finite, and a reward paid on a masked token belongs to the trained token before it.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from verl.algos.registry import AdvantageEstimator, register_adv_est
from verl.utils.groupwise import as_torch_index, group_mean_std
from verl.utils.torch_functional import masked_whiten

if TYPE_CHECKING:
    from verl.config.algorithm import AlgoConfig


@register_adv_est(AdvantageEstimator.GAE, built_in=True)
@torch.no_grad()
def compute_gae_advantage_return(
    token_level_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    gamma: float,
    lam: float,
    config: "AlgoConfig | None" = None,
) -> tuple[Tensor, Tensor]:
    """Exponentially weighted temporal differences (arXiv:1506.02438).

        delta_t  = r_t + gamma V_next - V_t
        A_t      = delta_t + gamma lam A_next
        return_t = A_t + V_t                            then A is whitened over the mask

    All tensors are (B, T). `next` is the next trained token: masked tokens (tool output, padding)
    are stepped over, so their values never bootstrap and they cost no discount; after the last
    trained token V and A are 0.

    `config.lam_critic` and `config.lam_actor_alpha` (VAPO, arXiv:2504.05118) give returns and
    advantages a lambda each: that of the critic, and 1 - 1 / (alpha l) for a response of l tokens.
    """
    rewards = reward_of_trained_tokens(token_level_rewards, response_mask)
    values = values.to(rewards.dtype)
    lam_actor = lam_critic = rewards.new_full((len(rewards),), lam)  # (B,)
    if config is not None and config.lam_actor_alpha is not None:
        lengths = response_mask.bool().sum(-1).clamp(min=1)
        lam_actor = (1 - 1 / (config.lam_actor_alpha * lengths.to(rewards.dtype))).clamp(min=0)
    if config is not None and config.lam_critic is not None:
        lam_critic = rewards.new_full((len(rewards),), config.lam_critic)
    advantages = temporal_differences(rewards, values, response_mask, gamma, lam_actor)
    for_critic = advantages
    if not torch.equal(lam_actor, lam_critic):
        for_critic = temporal_differences(rewards, values, response_mask, gamma, lam_critic)
    returns = torch.where(response_mask.bool(), for_critic + values, 0.0)
    return whiten(advantages, response_mask), returns


def temporal_differences(
    rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: Tensor
) -> Tensor:
    """GAE's sums A_t before whitening, (B, T); `lam` is (B,), `rewards` are on trained tokens."""
    is_trained = response_mask.bool().T  # (T, B): one row per step of the recursion
    rewards, values = rewards.T.contiguous(), values.T.contiguous()
    advantages = torch.zeros_like(rewards)
    next_value = next_advantage = torch.zeros_like(rewards[0])
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * next_value - values[t]
        advantages[t] = delta + gamma * lam * next_advantage
        next_value = torch.where(is_trained[t], values[t], next_value)
        next_advantage = torch.where(is_trained[t], advantages[t], next_advantage)
    return advantages.T


@register_adv_est(AdvantageEstimator.REINFORCE_PLUS_PLUS, built_in=True)
@torch.no_grad()
def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    config: "AlgoConfig | None" = None,
    gamma: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Discounted returns, whitened over the batch (arXiv:2501.03262).

        return_t = r_t + gamma return_next              then A = whiten(return) over the mask

    Rewards and mask are (B, T). Where `config` is given, `config.gamma` counts. Returns cross
    masked tokens.
    """
    discount = gamma if config is None else config.gamma
    returns = discounted_returns(token_level_rewards, response_mask, discount)
    return whiten(returns, response_mask), returns


@register_adv_est(AdvantageEstimator.REINFORCE_PLUS_PLUS_BASELINE, built_in=True)
@torch.no_grad()
def compute_reinforce_plus_plus_baseline_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    epsilon: float = 1e-6,
    config: "AlgoConfig | None" = None,
) -> tuple[Tensor, Tensor]:
    """Reward minus the mean of the prompt's group, whitened over the batch (arXiv:2501.03262).

        A_it = whiten(r_i - mean_g) over the mask       a group of one has mean 0

    Rewards and mask are (B, T), `index` (B,). Whitening weighs responses by their length, so it
    may move a group of equal rewards away from 0; if every group is of that kind, all is 0.
    """
    reward = outcome_reward(token_level_rewards)  # (B,)
    gidx = as_torch_index(index, reward.device)
    mean, _, _ = group_mean_std(reward, gidx)
    centred, _ = spread_over_tokens(reward - mean[gidx], response_mask)
    advantages = whiten(centred, response_mask)
    return advantages, advantages


@register_adv_est(AdvantageEstimator.REMAX, built_in=True)
@torch.no_grad()
def compute_remax_outcome_advantage(
    token_level_rewards: Tensor,
    reward_baselines: Tensor,
    response_mask: Tensor,
    config: "AlgoConfig | None" = None,
) -> tuple[Tensor, Tensor]:
    """Return minus the reward of the greedy response to the same prompt (arXiv:2310.10505).

        A_t = return_t - baseline                       return_t = r_t + return_next

    Rewards and mask are (B, T), `reward_baselines` (B,).
    """
    returns = discounted_returns(token_level_rewards, response_mask, gamma=1.0)
    baseline = require_finite(reward_baselines, "reward_baselines")[:, None]
    return torch.where(response_mask.bool(), returns - baseline, 0.0), returns


def require_finite(rewards: Tensor, name: str = "token_level_rewards") -> Tensor:
    """`rewards` (B, ...) unchanged; ValueError naming the rows that hold NaN or infinity."""
    is_bad = ~torch.isfinite(rewards.reshape(len(rewards), -1)).all(-1)
    if is_bad.any():
        rows = is_bad.nonzero().flatten().tolist()
        shown = ", ".join(map(str, rows[:8])) + (", ..." if len(rows) > 8 else "")
        raise ValueError(
            f"{name} holds NaN or infinity in {len(rows)} of {len(rewards)} rows (row {shown}); "
            "a response without a score must be left out of the batch, together with its group"
        )
    return rewards


def outcome_reward(token_level_rewards: Tensor) -> Tensor:
    """One reward per response, (B,): the sum over its tokens, wherever on them it was paid."""
    total = require_finite(token_level_rewards).sum(-1)
    return total if total.is_floating_point() else total.float()


def spread_over_tokens(advantage: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Give every trained token of response i the advantage (B,) of i; the returns are the same."""
    per_token = torch.where(response_mask.bool(), advantage[:, None], 0.0)  # (B, T)
    return per_token, per_token


def reward_of_trained_tokens(token_level_rewards: Tensor, response_mask: Tensor) -> Tensor:
    """Move what was paid on a masked token (tool output) to the trained token before it, (B, T).

    That token is the action that led there. Without this, a score placed on the last token of a
    response that ends in tool output would be lost. What is paid before the first trained token is
    not owed to any action and is left out.
    """
    rewards = require_finite(token_level_rewards)
    position = torch.arange(rewards.shape[-1], device=rewards.device).expand_as(rewards)
    action = torch.where(response_mask.bool(), position, -1).cummax(-1).values  # last trained <= t
    owed = torch.where(action >= 0, rewards, 0.0)
    return torch.zeros_like(owed).scatter_add_(-1, action.clamp(min=0), owed)


def discounted_returns(token_level_rewards: Tensor, response_mask: Tensor, gamma: float) -> Tensor:
    """R_t = r_t + gamma R_next, `next` being the next trained token; (B, T), 0 outside the mask.

    Returns cross masked tokens: a turn is credited with what later turns earn, and tool output is
    not discounted.
    """
    rewards = reward_of_trained_tokens(token_level_rewards, response_mask)
    if gamma == 1.0:
        returns = rewards.flip(-1).cumsum(-1).flip(-1)
        return torch.where(response_mask.bool(), returns, 0.0)
    is_trained = response_mask.bool().T  # (T, B): one row per step of the recursion
    rewards = rewards.T.contiguous()
    returns = torch.zeros_like(rewards)
    following = torch.zeros_like(rewards[0])
    for t in reversed(range(len(rewards))):
        following = torch.where(is_trained[t], rewards[t] + gamma * following, following)
        returns[t] = following
    return torch.where(is_trained, returns, 0.0).T.contiguous()


def whiten(values: Tensor, response_mask: Tensor) -> Tensor:
    """Mean 0 and variance 1 over all trained tokens of the batch, 0 elsewhere.

    Equal values whiten to exactly 0: they are measured from one of them, so that no rounding of
    the mean is left to be blown up.
    """
    is_trained = response_mask.bool()
    if not is_trained.any():
        return torch.zeros_like(values)
    from_largest = values - values[is_trained].max()
    return torch.where(is_trained, masked_whiten(from_largest, is_trained), 0.0)

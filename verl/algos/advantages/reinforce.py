"""REINFORCE with a batch-wide scale (REINFORCE++) or a greedy baseline (ReMax)."""

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from verl.algos.advantages.rewards import (
    discounted_returns,
    outcome_reward,
    require_finite,
    spread_over_tokens,
    whiten,
)
from verl.algos.registry import AdvantageEstimator, register_adv_est
from verl.utils.groupwise import as_torch_index, group_mean_std

if TYPE_CHECKING:
    from verl.config.algorithm import AlgoConfig


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

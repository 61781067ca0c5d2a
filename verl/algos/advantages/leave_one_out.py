"""Baselines without a critic or a standard deviation: the peers of a response, or their lengths.

As in `group_relative`, `index` (B,) labels the prompt instance of each response, and a group whose
rewards are all equal gets an advantage of exactly 0.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from verl.algos.advantages.rewards import outcome_reward, spread_over_tokens
from verl.algos.registry import AdvantageEstimator, register_adv_est
from verl.utils.groupwise import as_torch_index, group_mean_std, group_weighted_mean

if TYPE_CHECKING:
    from verl.config.algorithm import AlgoConfig


@register_adv_est(AdvantageEstimator.RLOO, built_in=True)
@torch.no_grad()
def compute_rloo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    epsilon: float = 1e-6,
    config: "AlgoConfig | None" = None,
) -> tuple[Tensor, Tensor]:
    """Reward minus the mean of the n - 1 others of the group (arXiv:2402.14740).

        A_i = r_i - mean_{j != i} r_j = (r_i - mean_g) n / (n - 1)

    A response without peers keeps its reward. Rewards and mask are (B, T), `index` (B,).
    """
    advantage, _ = _leave_one_out(outcome_reward(token_level_rewards), index)
    return spread_over_tokens(advantage, response_mask)


@register_adv_est(AdvantageEstimator.RLOO_VECTORIZED, built_in=True)
@torch.no_grad()
def compute_rloo_vectorized_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    epsilon: float = 1e-6,
    config: "AlgoConfig | None" = None,
) -> tuple[Tensor, Tensor]:
    """As `compute_rloo_outcome_advantage`, but a response without peers gets 0."""
    advantage, size = _leave_one_out(outcome_reward(token_level_rewards), index)
    return spread_over_tokens(advantage.masked_fill(size == 1, 0.0), response_mask)


@register_adv_est(AdvantageEstimator.OPO, built_in=True)
@torch.no_grad()
def compute_opo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    epsilon: float = 1e-6,
    config: "AlgoConfig | None" = None,
) -> tuple[Tensor, Tensor]:
    """Length-weighted baseline, the one of least variance on-policy (arXiv:2505.23585).

        A_i = r_i - sum_j len_j r_j / sum_j len_j       over the group, len_j = sum_t m_jt

    A response without peers keeps its reward. Rewards and mask are (B, T), `index` (B,). Meant for
    exact on-policy updates: one mini-batch per batch, no KL or entropy term.
    """
    reward = outcome_reward(token_level_rewards)  # (B,)
    gidx = as_torch_index(index, reward.device)
    baseline = group_weighted_mean(reward, response_mask.sum(-1), gidx)  # (G,)
    baseline = baseline.masked_fill(torch.bincount(gidx) == 1, 0.0)
    return spread_over_tokens(reward - baseline[gidx], response_mask)


def _leave_one_out(reward: Tensor, index: np.ndarray) -> tuple[Tensor, Tensor]:
    """Each row's reward minus the mean of its peers, and the size of its group; both (B,)."""
    gidx = as_torch_index(index, reward.device)
    mean, _, count = group_mean_std(reward, gidx)
    size = count[gidx]
    return (reward - mean[gidx]) * size / (size - 1).clamp(min=1), size

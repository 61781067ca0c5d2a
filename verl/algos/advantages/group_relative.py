"""Each response against the other responses to its prompt: GRPO, leave-one-out and their relatives.

`index` (B,) holds one label per response, equal for responses to the same prompt *instance* (the
uid of the row, never its text: a prompt drawn twice makes two groups). A group whose rewards are
all equal gets an advantage of exactly 0. A group of one has mean 0 and std 1, so that its reward
passes through.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from verl.algos.advantages.returns import outcome_reward, spread_over_tokens
from verl.algos.registry import AdvantageEstimator, register_adv_est
from verl.utils.groupwise import (
    as_torch_index,
    group_max,
    group_mean_std,
    group_sum,
    group_top_two,
    group_weighted_mean,
)

if TYPE_CHECKING:
    from verl.config.algorithm import AlgoConfig


@register_adv_est(AdvantageEstimator.GRPO, built_in=True)
@torch.no_grad()
def compute_grpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: "AlgoConfig | None" = None,
) -> tuple[Tensor, Tensor]:
    """Group-relative advantage (arXiv:2402.03300, section 4.1).

        A_i = (r_i - mean_g) / (std_g + epsilon)        r_i = sum_t r_it, std over n - 1

    Rewards and mask are (B, T), `index` (B,). Without `norm_adv_by_std_in_grpo` nothing is divided
    (Dr. GRPO, arXiv:2503.20783), so that easy and hard prompts weigh alike.
    """
    reward = outcome_reward(token_level_rewards)  # (B,)
    gidx = as_torch_index(index, reward.device)
    mean, std, _ = group_mean_std(reward, gidx, eps=0.0)  # (G,)
    advantage = reward - mean[gidx]
    if norm_adv_by_std_in_grpo:
        advantage = advantage / (std[gidx] + epsilon)
    return spread_over_tokens(advantage, response_mask)


# Both names exist in users' configurations.
compute_grpo_vectorized_outcome_advantage = register_adv_est(
    AdvantageEstimator.GRPO_VECTORIZED, built_in=True
)(compute_grpo_outcome_advantage)


@register_adv_est(AdvantageEstimator.GRPO_PASSK, built_in=True)
@torch.no_grad()
def compute_grpo_passk_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: "AlgoConfig | None" = None,
) -> tuple[Tensor, Tensor]:
    """Credit only the best response of each group, for pass@k (arXiv:2503.19595).

        A_best = (r_best - r_second) / (std_g + epsilon)        all others 0

    The division is left out without `norm_adv_by_std_in_grpo`; where `config` is given, its value
    of that option counts. Rewards and mask are (B, T), `index` (B,). A group of one is an error.
    """
    reward = outcome_reward(token_level_rewards)  # (B,)
    gidx = as_torch_index(index, reward.device)
    _, std, count = group_mean_std(reward, gidx, eps=0.0)
    if (count < 2).any():
        row = int((count[gidx] < 2).nonzero()[0])
        raise ValueError(
            f"grpo_passk compares the best response with the second best, but the prompt of row "
            f"{row} (uid {index[row]!r}) has only one; set rollout.n to 2 or more"
        )
    best, second = group_top_two(reward, gidx)  # (G,) rows
    gain = reward[best] - reward[second]
    if norm_adv_by_std_in_grpo if config is None else config.norm_adv_by_std_in_grpo:
        gain = gain / (std + epsilon)
    advantage = torch.zeros_like(reward)
    advantage[best] = gain
    return spread_over_tokens(advantage, response_mask)


@register_adv_est(AdvantageEstimator.GPG, built_in=True)
@torch.no_grad()
def compute_gpg_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    epsilon: float = 1e-6,
    f_norm: float = 1.0,
    alpha: float = 1.0,
    config: "AlgoConfig | None" = None,
) -> tuple[Tensor, Tensor]:
    """Group policy gradient, for `policy_loss.loss_mode=gpg` (arXiv:2504.02546).

        A_i = alpha B / count(r != 0) * (r_i - mean_g) / f_norm

    The factor B / count(r != 0) makes up for responses without a signal. Rewards and mask are
    (B, T), `index` (B,); there is no std, so `epsilon` plays no part.
    """
    reward = outcome_reward(token_level_rewards)  # (B,)
    gidx = as_torch_index(index, reward.device)
    mean, _, _ = group_mean_std(reward, gidx)
    scale = alpha * len(reward) / reward.count_nonzero().clamp(min=1)
    return spread_over_tokens(scale * (reward - mean[gidx]) / f_norm, response_mask)


@register_adv_est(AdvantageEstimator.GDPO, built_in=True)
@torch.no_grad()
def compute_gdpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    reward_parts: np.ndarray | None = None,
    epsilon: float = 1e-6,
    config: "AlgoConfig | None" = None,
) -> tuple[Tensor, Tensor]:
    """Normalise several rewards apart, then their sum over the batch (GDPO, arXiv:2601.05242).

        S_i = sum_k w_k (r_ik - mean_g r_k) / (std_g r_k + epsilon)
        A_i = (S_i - mean S) / (std S + epsilon)                    mean and std over the batch

    `reward_parts` (B, K) are the rewards that `config.gdpo_reward_keys` names, w is
    `config.gdpo_reward_weights`, all 1 if null; without parts the total is the one reward. Rewards
    and mask are (B, T), `index` (B,). A reward with a small range is not drowned by a large one.
    """
    total = outcome_reward(token_level_rewards)  # (B,)
    parts = total[:, None] if reward_parts is None else torch.as_tensor(reward_parts)
    parts = parts.to(total.device, torch.float64)
    weights = None if config is None else config.gdpo_reward_weights
    gidx = as_torch_index(index, total.device)
    advantage = torch.zeros_like(total, dtype=torch.float64)
    for part, weight in zip(parts.T, weights or [1.0] * parts.shape[1], strict=True):
        mean, std, _ = group_mean_std(part, gidx, eps=0.0)  # (G,)
        advantage += weight * (part - mean[gidx]) / (std[gidx] + epsilon)
    if len(advantage) > 1:
        advantage = (advantage - advantage.mean()) / (advantage.std() + epsilon)
    return spread_over_tokens(advantage.to(total.dtype), response_mask)


@register_adv_est(AdvantageEstimator.SPPO, built_in=True)
@torch.no_grad()
def compute_sppo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    config: "AlgoConfig | None" = None,
) -> tuple[Tensor, Tensor]:
    """Reward above a baseline, for `policy_loss.loss_mode=sppo` (arXiv:2405.00675).

        mean             A_i = r_i - mean_g r
        softmean         A_i = r_i - 1/eta log mean_g exp(eta r)
        batch_softmean   the same with the mean over the whole batch

    `config.sppo_baseline` chooses; the mean without a config. With win rates for rewards the mean
    is 1/2 in expectation, the paper's constant; the soft mean is the estimate of the log-partition
    function that it stands for. Rewards and mask are (B, T), `index` (B,).
    """
    reward = outcome_reward(token_level_rewards)  # (B,)
    gidx = as_torch_index(index, reward.device)
    if config is None or config.sppo_baseline == "mean":
        mean, _, _ = group_mean_std(reward, gidx)
        return spread_over_tokens(reward - mean[gidx], response_mask)
    if config.sppo_baseline == "batch_softmean":
        gidx = torch.zeros_like(gidx)
    largest = group_max(reward, gidx)  # (G,)
    powers = torch.exp(config.sppo_eta * (reward - largest[gidx]))
    soft_mean = largest + (group_sum(powers, gidx) / torch.bincount(gidx)).log() / config.sppo_eta
    return spread_over_tokens(reward - soft_mean[gidx], response_mask)


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

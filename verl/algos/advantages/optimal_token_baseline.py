"""A baseline of least variance for every token position, from the policy's own probabilities.

What arrives at token t multiplies the scores of all tokens up to t in the policy gradient, each
with its importance weight: Z_t = sum_{s <= t} rho_s grad log pi_s. The baseline that minimises
E |Z_t|^2 (G_t - B_t)^2 is B_t = E[|Z_t|^2 G_t] / E[|Z_t|^2] (arXiv:2602.07078). Under the policy
that sampled, E[rho_s grad log pi_s | tokens before s] = 0, so products of different tokens vanish:

    E |Z_t|^2 = E sum_{s <= t} rho_s^2 |grad log pi_s|^2

With respect to the logits |grad log pi|^2 is 1 - 2 pi + sum(pi^2). The weight of a token thus stays
with that token; only where all rho of a response are equal does it factor out. Responses of one
prompt are averaged position by position with these sums. `sum_pi_squared` comes from the actor
(`actor.calculate_sum_pi_squared=True`).
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from verl.algos.advantages.returns import discounted_returns, outcome_reward
from verl.algos.registry import AdvantageEstimator, register_adv_est
from verl.utils.groupwise import as_torch_index, group_mean_std, group_sum, group_weighted_mean


@register_adv_est(AdvantageEstimator.OPTIMAL_TOKEN_BASELINE, built_in=True)
@torch.no_grad()
def compute_optimal_token_baseline_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
    handle_zero_tail: bool = False,
    epsilon: float = 1e-8,
) -> tuple[Tensor, Tensor]:
    """Return minus the weighted mean return of the group at the same position.

        G_t = r_t + G_next
        W_t = sum_{s <= t} rho_s^2 (1 - 2 pi_s + sum(pi_s^2)) + epsilon
        A_t = G_t - sum_g W_t G_t / sum_g W_t           over responses that have a token at t

    All tensors are (B, T), `index` (B,); rho are the `rollout_is_weights`, if any. A response
    without peers has baseline 0. Past the end of the second longest response the longest has no
    peers and A is 0; with `handle_zero_tail` the baseline there is 0 instead, so that A is G,
    unless all rewards of the group are equal.
    """
    is_trained = response_mask.bool()
    tokens = _Tokens(
        returns=discounted_returns(token_level_rewards, response_mask, gamma=1.0),
        noise=_gradient_noise(old_log_probs, sum_pi_squared, rollout_is_weights, is_trained),
        is_trained=is_trained,
    )
    peers = _Peers(outcome_reward(token_level_rewards), index)
    return _minus_baseline(tokens, peers, handle_zero_tail, epsilon), tokens.returns


@register_adv_est(AdvantageEstimator.TIR_OPTIMAL_TOKEN_BASELINE, built_in=True)
@torch.no_grad()
def compute_multi_turn_optimal_token_baseline_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
    handle_zero_tail: bool = True,
    epsilon: float = 1e-8,
) -> tuple[Tensor, Tensor]:
    """`compute_optimal_token_baseline_advantage` for responses interleaved with tool output.

    Position t is the t-th trained token of a response, whatever stands between: the rows are
    compacted by their mask, compared, and laid out again.
    """
    is_trained = response_mask.bool()
    order = torch.argsort(is_trained.int(), dim=-1, descending=True, stable=True)  # trained first
    returns = discounted_returns(token_level_rewards, response_mask, gamma=1.0)
    noise = _gradient_noise(old_log_probs, sum_pi_squared, rollout_is_weights, is_trained)
    compact = _Tokens(
        returns=returns.gather(-1, order),
        noise=noise.gather(-1, order),
        is_trained=is_trained.gather(-1, order),
    )
    peers = _Peers(outcome_reward(token_level_rewards), index)
    advantages = _minus_baseline(compact, peers, handle_zero_tail, epsilon)
    return torch.zeros_like(advantages).scatter_(-1, order, advantages), returns


@dataclass
class _Tokens:
    """What is known of each token, all (B, T)."""

    returns: Tensor
    noise: Tensor
    is_trained: Tensor


class _Peers:
    """Which responses are compared with which."""

    def __init__(self, reward: Tensor, index: np.ndarray) -> None:
        self.group = as_torch_index(index, reward.device)  # (B,)
        _, std, count = group_mean_std(reward, self.group, eps=0.0)
        self.is_alone = (count == 1)[self.group, None]  # (B, 1)
        self.all_equal = (std == 0)[self.group, None]  # (B, 1)


def _gradient_noise(
    old_log_probs: Tensor, sum_pi_squared: Tensor, rho: Tensor | None, is_trained: Tensor
) -> Tensor:
    """Squared norm of rho grad log pi in the logits; never negative, but it may round so."""
    noise = (1 - 2 * old_log_probs.exp() + sum_pi_squared).clamp(min=0)
    if rho is not None:
        noise = noise * rho.square()
    return torch.where(is_trained, noise, 0.0)


def _minus_baseline(
    tokens: _Tokens, peers: _Peers, handle_zero_tail: bool, epsilon: float
) -> Tensor:
    weight = torch.where(tokens.is_trained, tokens.noise.cumsum(-1) + epsilon, 0.0)
    baseline = group_weighted_mean(tokens.returns, weight, peers.group)[peers.group]  # (B, T)
    has_baseline = ~peers.is_alone
    if handle_zero_tail:
        has_baseline = has_baseline & (~_beyond_peers(tokens, peers) | peers.all_equal)
    advantage = tokens.returns - torch.where(has_baseline, baseline, 0.0)
    return torch.where(tokens.is_trained, advantage, 0.0)


def _beyond_peers(tokens: _Tokens, peers: _Peers) -> Tensor:
    """Where only the longest response of a group still runs, (B, T)."""
    position = torch.arange(tokens.is_trained.shape[-1], device=tokens.is_trained.device)
    length = torch.where(tokens.is_trained, position + 1, 0).amax(-1)  # to the last trained token
    runs = (position < length[:, None]).long()  # (B, T)
    return group_sum(runs, peers.group)[peers.group] == 1

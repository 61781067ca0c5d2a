"""PRIME's arithmetic: the implicit process reward, its loss, and advantages from two rewards.

An implicit reward model is a language model pi with a frozen reference pi_ref (arXiv:2412.01981).
How much it favours a token is that token's reward; the sum over a response is its logit:

    r_t = beta (log pi(y_t | y_<t) - log pi_ref(y_t | y_<t))        L = BCE(sigmoid(sum_t r_t), acc)

so a model that is trained on outcomes alone rewards every token. Advantages (arXiv:2502.01456,
section 3.2) center token rewards and outcomes separately, by the mean over the other responses to
the prompt, where a response counts with its mean token reward:

    c_t = k_process (r_t - mean of the others' mean_s r_s) + [t is the last] k_outcome (acc - ...)
    A = whiten(c_t + c_t+1 + ...)
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from verl.utils.groupwise import as_torch_index, group_sum
from verl.utils.torch_functional import masked_whiten

NORM_EPSILON = 1e-6


@dataclass(frozen=True, kw_only=True)
class PrimeWeights:
    """How the two rewards enter the advantage."""

    process: float = 5.0
    outcome: float = 5.0
    is_scaled: bool = False
    """Scale a reward by n/(n-1) and subtract the sum of all n means over n-1, as verl does. For the
    outcome it is the same; a token reward moves by (r_t - its own mean)/(n-1) more."""


def implicit_rewards(
    log_probs: Tensor, ref_log_probs: Tensor, response_mask: Tensor, *, beta: float
) -> Tensor:
    """(B, T), r_t of each response token; 0 outside the mask."""
    return beta * (log_probs - ref_log_probs).masked_fill(response_mask == 0, 0)


def implicit_loss(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    response_mask: Tensor,
    accuracy: Tensor,
    *,
    beta: float,
    num_sequences: int,
) -> Tensor:
    """The share of some rows in the mean over the `num_sequences` sequences of an optimizer step.

    `accuracy` is (B,) in [0, 1]. A row without response tokens has no part.
    """
    logits = implicit_rewards(log_probs, ref_log_probs, response_mask, beta=beta).sum(-1)
    losses = F.binary_cross_entropy_with_logits(logits, accuracy.to(logits), reduction="none")
    return (losses * response_mask.bool().any(-1)).sum() / num_sequences


def shaped_rewards(
    rewards: Tensor, response_mask: Tensor, *, granularity: str, norm: str
) -> Tensor:
    """Token rewards as `prime_granularity` and `prime_norm` ask for; (B, T).

    `whole` puts the sum over a response on its last token. `batch_norm` divides by the largest
    absolute reward to go in the batch.
    """
    if granularity == "whole":
        rewards = on_last_token(rewards.sum(-1), response_mask)
    if norm == "batch_norm":
        rewards = rewards / (rewards_to_go(rewards).abs().max() + NORM_EPSILON)
    return rewards


def prime_advantage(
    process: Tensor,
    outcome: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    weights: PrimeWeights,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns, (B, T) each, from token rewards (B, T) and outcomes (B,).

    `index` is (B,) with one label per prompt. A prompt with a single response has no peers: its
    rewards pass through.
    """
    mask = response_mask.to(process)
    groups = as_torch_index(index, process.device)
    means = (process * mask).sum(-1) / mask.sum(-1).clamp(min=1)
    factor, baseline = leave_one_out(means, groups, is_scaled=weights.is_scaled)
    centered = weights.process * (process * factor[:, None] - baseline[:, None])
    factor, baseline = leave_one_out(outcome.to(process), groups, is_scaled=weights.is_scaled)
    final = weights.outcome * (outcome.to(process) * factor - baseline)
    returns = rewards_to_go((centered + on_last_token(final, response_mask)) * mask)
    return masked_whiten(returns, mask) * mask, returns * mask


def leave_one_out(means: Tensor, groups: Tensor, *, is_scaled: bool) -> tuple[Tensor, Tensor]:
    """(B,) each: the factor of a response's rewards, and what is subtracted from them."""
    size = group_sum(torch.ones_like(means, dtype=torch.float64), groups)[groups]
    total = group_sum(means.double(), groups)[groups]
    peers = (size - 1).clamp(min=1)
    if is_scaled:
        factor = torch.where(size > 1, size / peers, 1.0)
        baseline = torch.where(size > 1, total / peers, 0.0)
    else:
        factor, baseline = torch.ones_like(total), (total - means.double()) / peers
    return factor.to(means.dtype), baseline.to(means.dtype)


def on_last_token(values: Tensor, response_mask: Tensor) -> Tensor:
    """(B, T) with `values` (B,) at the last token of each mask; nowhere where a mask is empty."""
    places = torch.arange(1, response_mask.shape[1] + 1, device=response_mask.device)
    last = (places * response_mask.bool()).amax(-1)  # (B,), 0 where there is none
    return torch.where(places == last[:, None], values[:, None], 0.0).to(values.dtype)


def rewards_to_go(rewards: Tensor) -> Tensor:
    """(B, T), the sum from each token to the end."""
    return rewards.flip(-1).cumsum(-1).flip(-1)


def pair_accuracy(logits: Tensor, accuracy: Tensor, index: np.ndarray) -> float:
    """How often the better of two responses to a prompt has the higher logit; NaN without pairs.

    A pair counts by how far its accuracies differ; equal logits are half right.
    """
    groups = as_torch_index(index, logits.device)
    is_better = accuracy[:, None] - accuracy[None]  # (B, B), of the row over the column
    weight = torch.where(groups[:, None] == groups[None], is_better.clamp(min=0), 0.0)
    difference = logits[:, None] - logits[None]
    right = (difference > 0).to(weight) + 0.5 * (difference == 0).to(weight)
    return float((weight * right).sum() / weight.sum()) if weight.any() else float("nan")

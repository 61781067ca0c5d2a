"""Clip-Cov and KL-Cov: keep the entropy up by restraining the few tokens that lower it most.

The covariance of a token says how much a policy-gradient step on it lowers the entropy:

    cov_it = (A_it - mean A) (log pi_it - mean log pi)      means over all tokens of the mini-batch

Both losses select tokens by it over the whole mini-batch, before it is split into micro-batches
(`prepare_loss`). The paper (arXiv:2505.22617) takes the log-probs of the policy at each optimizer
step. A trainer that does not spend a forward pass on them prepares with the old log-probs: the same
selection in the first mini-batch of a training step, where the two policies are one, and a slightly
older view of the same tokens in the later ones. A loss called without a selection makes it from the
rows and the log-probs it is given.

Nothing is random: lots are drawn from the data, so that a selection does not depend on the order of
the rows, on padding, or on any generator's state, and a resumed run makes the same one.
"""

import torch
from torch import Tensor

from verl.algos.policy_losses.terms import (
    aggregate,
    clip_range,
    clipped_surrogate,
    log_ratio,
    options,
    prepared_by,
    token_means,
)
from verl.algos.registry import register_policy_loss
from verl.config.actor import ActorConfig
from verl.utils.scramble import scramble
from verl.utils.torch_functional import masked_sum


def select_clip_cov_tokens(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: ActorConfig,
) -> dict[str, Tensor]:
    """Draw max(1, clip_cov_ratio * tokens) of the tokens with clip_cov_lb < cov < clip_cov_ub.

    Tokens that the clip range already deprives of their gradient do not take part.
    """
    rule = config.policy_loss
    covariance = token_covariance(log_prob, advantages, response_mask)
    log_r = log_ratio(log_prob, old_log_prob, response_mask)
    _, is_clipped = clipped_surrogate(log_r, advantages, *clip_range(config))
    in_range = (covariance > rule.clip_cov_lb) & (covariance < rule.clip_cov_ub)
    candidates = in_range & ~is_clipped & response_mask.bool()
    count = share_of_tokens(response_mask, rule.clip_cov_ratio)
    lots = token_lots(log_prob, response_mask)
    return {"selected_tokens": draw_tokens(candidates, lots, count)}


@register_policy_loss("clip_cov", built_in=True)
@prepared_by(select_clip_cov_tokens)
def compute_policy_loss_clip_cov(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: ActorConfig | None = None,
    rollout_is_weights: Tensor | None = None,
    selected_tokens: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clip-Cov (arXiv:2505.22617).

        L = max(-A r, -A clip(r, 1 - low, 1 + high)),  and 0 for the selected tokens

    `pg_clipfrac` is the fraction of tokens selected. A selected token stays in the denominator.
    """
    config = options(config)
    if selected_tokens is None:
        selected_tokens = select_clip_cov_tokens(
            old_log_prob, log_prob.detach(), advantages, response_mask, config
        )["selected_tokens"]
    log_r = log_ratio(log_prob, old_log_prob, response_mask)
    loss, _ = clipped_surrogate(log_r, advantages, *clip_range(config))
    loss = torch.where(selected_tokens, 0, loss)
    metrics = token_means(response_mask, pg_clipfrac=selected_tokens, ppo_kl=-log_r)
    return aggregate(loss, response_mask, loss_agg_mode, config, rollout_is_weights), metrics


def select_kl_cov_tokens(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: ActorConfig,
) -> dict[str, Tensor]:
    """The max(1, kl_cov_ratio * tokens) tokens of largest covariance; `old_log_prob` is unused."""
    covariance = token_covariance(log_prob, advantages, response_mask)
    count = share_of_tokens(response_mask, config.policy_loss.kl_cov_ratio)
    lots = token_lots(log_prob, response_mask)
    return {"selected_tokens": top_tokens(covariance, lots, response_mask, count)}


@register_policy_loss("kl_cov", built_in=True)
@prepared_by(select_kl_cov_tokens)
def compute_policy_loss_kl_cov(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: ActorConfig | None = None,
    rollout_is_weights: Tensor | None = None,
    selected_tokens: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """KL-Cov (arXiv:2505.22617).

        L = -A r + ppo_kl_coef |log r|   for the selected tokens,   -A r for the others

    There is no clip. `ppo_kl` is the mean of |log r|.
    """
    config = options(config)
    if selected_tokens is None:
        selected_tokens = select_kl_cov_tokens(
            old_log_prob, log_prob.detach(), advantages, response_mask, config
        )["selected_tokens"]
    log_r = log_ratio(log_prob, old_log_prob, response_mask)
    penalty = config.policy_loss.ppo_kl_coef * log_r.abs()
    loss = -advantages * log_r.exp() + torch.where(selected_tokens, penalty, 0)
    metrics = token_means(response_mask, ppo_kl=log_r.abs())
    return aggregate(loss, response_mask, loss_agg_mode, config, rollout_is_weights), metrics


LARGEST = torch.iinfo(torch.int64).max


def token_covariance(log_prob: Tensor, advantages: Tensor, response_mask: Tensor) -> Tensor:
    """(B, T), in double precision; 0 outside the mask."""
    centred = [_centred(values.double(), response_mask) for values in (log_prob, advantages)]
    return centred[0] * centred[1]


def draw_tokens(candidates: Tensor, lots: Tensor, count: int) -> Tensor:
    """The `count` candidates (all, if fewer) with the smallest lots, as a mask (B, T)."""
    lots = torch.where(candidates, lots, LARGEST).flatten()
    chosen = lots.argsort(stable=True)[:count]
    return _as_mask(chosen, candidates) & candidates


def top_tokens(values: Tensor, lots: Tensor, response_mask: Tensor, count: int) -> Tensor:
    """The `count` tokens of largest value, as a mask (B, T); among equals the lots decide."""
    is_token = response_mask.bool()
    by_lot = lots.flatten().argsort(stable=True)
    values = torch.where(is_token, values, -torch.inf).flatten()
    chosen = by_lot[values[by_lot].argsort(descending=True, stable=True)][:count]
    return _as_mask(chosen, is_token) & is_token


def token_lots(log_prob: Tensor, response_mask: Tensor) -> Tensor:
    """A pseudo-random integer per token, (B, T), that depends only on its sequence and its place.

    The log-probs of a sequence, bit by bit, are its fingerprint.
    """
    bits = torch.where(response_mask.bool(), log_prob, 0).double().view(torch.int64)
    place = scramble(torch.arange(1, bits.shape[-1] + 1, device=bits.device))  # (T,)
    fingerprint = (scramble(bits + place) * response_mask.long()).sum(-1, keepdim=True)  # (B, 1)
    return scramble(fingerprint + place)


def share_of_tokens(response_mask: Tensor, ratio: float) -> int:
    """How many tokens the fraction `ratio` of the batch is; at least one."""
    return max(1, int(ratio * int(response_mask.sum())))


def _centred(values: Tensor, mask: Tensor) -> Tensor:
    mean = masked_sum(values, mask) / mask.sum().clamp(min=1)
    return torch.where(mask.bool(), values - mean, 0)


def _as_mask(positions: Tensor, like: Tensor) -> Tensor:
    flat = torch.zeros(like.numel(), dtype=torch.bool, device=like.device)
    flat[positions] = True
    return flat.view_as(like)

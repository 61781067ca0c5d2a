"""Losses on the ratio of new to old policy: PPO (the default), CISPO, SAPO, GSPO and GMPO.

PPO clips the ratio of each token, with a dual clip for negative advantages. CISPO uses it as a
clipped weight, so that no token loses its gradient. SAPO replaces the hard clip by a smooth gate.
In GSPO the ratio belongs to the sequence; GMPO takes the geometric mean of clipped token ratios.
"""

import warnings

import torch
from torch import Tensor

from verl.algos.aggregate import agg_loss
from verl.algos.policy_losses.terms import (
    aggregate,
    clip_range,
    clipped_surrogate,
    log_ratio,
    options,
    token_means,
)
from verl.algos.registry import register_policy_loss
from verl.config.actor import ActorConfig
from verl.utils.torch_functional import masked_sum


@register_policy_loss("vanilla", built_in=True)
def compute_policy_loss_vanilla(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: ActorConfig | None = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO-clip (arXiv:1707.06347) with separate bounds (clip-higher, arXiv:2503.14476).

        L = max(-A r, -A clip(r, 1 - low, 1 + high)),   r = exp(log_prob - old_log_prob)
        L = min(L, -A c)   where A < 0                  dual clip, arXiv:1912.09729

    Without the second line a token with A < 0 whose ratio explodes has an unbounded loss. Each
    token is multiplied by `rollout_is_weights`, if any. All tensors are (B, T).
    """
    config = options(config)
    log_r = log_ratio(log_prob, old_log_prob, response_mask)
    low, high = clip_range(config)
    loss, is_clipped, is_clipped_below = dual_clip(
        log_r, advantages, low, high, config.clip_ratio_c
    )
    metrics = token_means(
        response_mask,
        pg_clipfrac=is_clipped,
        ppo_kl=-log_r,
        pg_clipfrac_lower=is_clipped_below,
    )
    return aggregate(loss, response_mask, loss_agg_mode, config, rollout_is_weights), metrics


def dual_clip(
    log_r: Tensor, advantages: Tensor, low: float, high: float, c: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of each token, where the clip range took effect, and where the bound `c` did."""
    if c <= 1:
        raise ValueError(
            f"clip_ratio_c is {c}; it bounds the ratio of tokens with negative advantage "
            "and must be greater than 1 (3.0 is usual)"
        )
    loss, is_clipped = clipped_surrogate(log_r, advantages, low, high)
    bound = -advantages * c
    is_bounded = (advantages < 0) & (loss > bound)
    return torch.where(is_bounded, bound, loss), is_clipped, is_bounded


def compute_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    cliprange: float | None = None,
    cliprange_low: float | None = None,
    cliprange_high: float | None = None,
    clip_ratio_c: float = 3.0,
    loss_agg_mode: str = "token-mean",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The older form of `compute_policy_loss_vanilla`, over rows that are the whole batch.

    Returns (loss, pg_clipfrac, ppo_kl, pg_clipfrac_lower). `cliprange` stands in for a bound that
    is not given.
    """
    warnings.warn(
        "compute_policy_loss is deprecated; use compute_policy_loss_vanilla with an ActorConfig",
        DeprecationWarning,
        stacklevel=2,
    )
    low = cliprange if cliprange_low is None else cliprange_low
    high = cliprange if cliprange_high is None else cliprange_high
    if low is None or high is None:
        raise ValueError("compute_policy_loss needs cliprange, or cliprange_low and cliprange_high")
    log_r = log_ratio(log_prob, old_log_prob, response_mask)
    loss, is_clipped, is_clipped_below = dual_clip(log_r, advantages, low, high, clip_ratio_c)

    def mean(value: Tensor) -> Tensor:
        return agg_loss(value.detach().to(loss.dtype), response_mask, "token-mean")

    return (
        agg_loss(loss, response_mask, loss_agg_mode),
        mean(is_clipped),
        mean(-log_r),
        mean(is_clipped_below),
    )


@register_policy_loss("cispo", built_in=True)
def compute_policy_loss_cispo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: ActorConfig | None = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped importance-sampling policy optimization (arXiv:2506.13585).

        L = -sg(clip(r, 1 - low, 1 + high)) A log pi

    sg stops the gradient. `clip_ratio_low` of 1 or more leaves the weight free to fall to 0, which
    is how the method is meant to be used.
    """
    config = options(config)
    low, high = clip_range(config)
    log_r = log_ratio(log_prob, old_log_prob, response_mask)
    ratio = log_r.detach().exp()
    weight = ratio.clamp(1 - low, 1 + high)
    loss = -weight * advantages * torch.where(response_mask.bool(), log_prob, 0)
    metrics = token_means(
        response_mask,
        pg_clipfrac=weight != ratio,
        ppo_kl=-log_r,
        pg_clipfrac_lower=torch.zeros_like(ratio),
    )
    return aggregate(loss, response_mask, loss_agg_mode, config, rollout_is_weights), metrics


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
    tau_pos, tau_neg = log_r.new_tensor(config.tau_pos), log_r.new_tensor(config.tau_neg)
    tau = torch.where(advantages > 0, tau_pos, tau_neg)
    loss = -advantages * torch.sigmoid(tau * (log_r.exp() - 1)) * 4 / tau
    never = torch.zeros_like(log_r)
    metrics = token_means(response_mask, pg_clipfrac=never, ppo_kl=-log_r, pg_clipfrac_lower=never)
    loss = aggregate(loss, response_mask, "seq-mean-token-mean", config, rollout_is_weights)
    return loss, metrics


LOG_SEQUENCE_RATIO_LIMIT = 10.0


@register_policy_loss("gspo", built_in=True)
def compute_policy_loss_gspo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    config: ActorConfig | None = None,
    rollout_is_weights: Tensor | None = None,
    session_log_ratio: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Group sequence policy optimization (arXiv:2507.18071).

        s_i = exp(1/n_i sum_t log r_it)          one ratio per sequence, normalised by its length
        L_it = max(-A s_it, -A clip(s_it, 1 - low, 1 + high))
        s_it = sg(s_i) pi_it / sg(pi_it)         the value of s_i, the gradient of token t

    sg stops the gradient; log s is at most 10. Sequences count alike whatever their length, so the
    aggregation is seq-mean-token-mean whatever `loss_agg_mode` says. `session_log_ratio` (B,) is
    log s_i where a sequence has more rows than these (`policy_losses.whole_sessions`).
    """
    config = options(config)
    log_r = log_ratio(log_prob, old_log_prob, response_mask)
    log_s = sequence_mean(log_r, response_mask).detach()  # (B,)
    if session_log_ratio is not None:
        log_s = session_log_ratio
    kept_log_prob = torch.where(response_mask.bool(), log_prob, 0)
    log_s_token = kept_log_prob - kept_log_prob.detach() + log_s[:, None]  # (B, T)
    log_s_token = log_s_token.clamp(max=LOG_SEQUENCE_RATIO_LIMIT)
    loss, is_clipped = clipped_surrogate(log_s_token, advantages, *clip_range(config))
    metrics = token_means(
        response_mask,
        pg_clipfrac=is_clipped,
        ppo_kl=-log_r,
        pg_clipfrac_lower=torch.zeros_like(is_clipped),
    )
    loss = aggregate(loss, response_mask, "seq-mean-token-mean", config, rollout_is_weights)
    return loss, metrics


@register_policy_loss("geo_mean", built_in=True)
def compute_policy_loss_geo_mean(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: ActorConfig | None = None,
    rollout_is_weights: Tensor | None = None,
    session_factor: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Geometric-mean policy optimization (arXiv:2507.20673).

        c_it = min(log r_it, high) where A > 0,  max(log r_it, -low) where A < 0
        L_i = -mean_t(A_it) exp(mean_t c_it)

    The bounds are on the logarithm of the ratio. The loss is the mean of L_i over the sequences of
    the whole mini-batch, whatever `loss_agg_mode` says. Of `rollout_is_weights` the geometric mean
    over the sequence is taken, which for sequence weights is the weight itself; a token of weight
    0 is rejected: both means are over the others. `session_factor` (B,) has L_i / n_i, weights
    included, where a sequence has more rows than these (`policy_losses.whole_sessions`).
    """
    config = options(config)
    log_r = log_ratio(log_prob, old_log_prob, response_mask)
    clipped, is_clipped_above, is_clipped_below = clipped_log_ratio(
        log_r, advantages, *clip_range(config)
    )
    metrics = token_means(
        response_mask,
        pg_clipfrac=is_clipped_above,
        ppo_kl=-log_r,
        pg_clipfrac_lower=is_clipped_below,
    )
    kept = without_rejected(response_mask, rollout_is_weights)
    if session_factor is not None:
        loss = session_factor[:, None] * (1 + clipped - clipped.detach()) * kept
        return aggregate(loss, response_mask, "seq-mean-token-sum", config), metrics
    loss = -sequence_mean(advantages, kept) * sequence_mean(clipped, kept).exp()
    if rollout_is_weights is not None:
        loss = loss * geometric_mean(rollout_is_weights.detach(), kept)
    has_tokens = response_mask.any(-1, keepdim=True).to(loss.dtype)
    return aggregate(loss[:, None], has_tokens, "seq-mean-token-sum", config), metrics


def clipped_log_ratio(
    log_r: Tensor, advantages: Tensor, low: float, high: float
) -> tuple[Tensor, Tensor, Tensor]:
    """GMPO's c_it, and where it is the upper and where the lower bound."""
    is_above = (advantages > 0) & (log_r > high)
    is_below = (advantages < 0) & (log_r < -low)
    return torch.where(is_above, high, torch.where(is_below, -low, log_r)), is_above, is_below


def sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """(B, T) to (B,); 0 for a sequence without a token."""
    return masked_sum(values, mask, -1) / mask.sum(-1).clamp(min=1)


def without_rejected(mask: Tensor, weights: Tensor | None) -> Tensor:
    return mask if weights is None else mask * (weights > 0)


def geometric_mean(weights: Tensor, mask: Tensor) -> Tensor:
    return sequence_mean(weights.log(), mask).exp()

"""Clip-Cov and KL-Cov: keep the entropy up by restraining the few tokens that lower it most.

Both select tokens by their covariance with the advantages over the whole mini-batch, before it is
cut into micro-batches (`prepare_loss`). The paper (arXiv:2505.22617) takes the log-probs of the
policy at each optimizer step. A trainer that does not spend a forward pass on them prepares with
the old log-probs: the same selection in the first mini-batch of a training step, where the two
policies are one, and a slightly older view of the same tokens in the later ones. A loss called
without a selection makes it from the rows and the log-probs it is given.
"""

import torch
from torch import Tensor

from verl.algos.policy_losses.preparation import prepared_by
from verl.algos.policy_losses.terms import (
    aggregate,
    clip_range,
    clipped_surrogate,
    log_ratio,
    options,
    token_means,
)
from verl.algos.policy_losses.token_selection import (
    draw_tokens,
    share_of_tokens,
    token_covariance,
    token_lots,
    top_tokens,
)
from verl.algos.registry import register_policy_loss
from verl.config.actor import ActorConfig


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

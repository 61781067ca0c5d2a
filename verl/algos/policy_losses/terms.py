"""What policy losses are made of: the ratio, its clip range, aggregation, metrics, and preparation.

A loss is a value per token, (B, T), then one call of `aggregate`, which divides by counts of the
whole mini-batch. So a loss written from these parts does not depend on how the mini-batch is split
into micro-batches and ranks.

A loss that selects tokens by comparing them with all others cannot do so inside a micro-batch. It
is declared with `@prepared_by(prepare)`: `prepare` sees the whole mini-batch once and returns
columns, one row per sequence, which are split into micro-batches like every other column and come
back to the loss as keyword arguments of the same names.

    columns = prepare_loss(loss_fn, old_log_prob=..., advantages=..., response_mask=..., config=...)
    for rows in micro_batches:
        loss, metrics = loss_fn(..., **{name: column[rows] for name, column in columns.items()})

Most losses need nothing, and then `columns` is empty. The preparation belongs to the function, not
to its name in the registry: a user's loss that replaces a built-in one does not inherit it.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from verl.algos.aggregate import agg_loss
from verl.config.actor import ActorConfig
from verl.utils.torch_functional import masked_sum

LOG_RATIO_LIMIT = 20.0


def log_ratio(log_prob: Tensor, old_log_prob: Tensor, response_mask: Tensor) -> Tensor:
    """log(pi / pi_old) of each token, (B, T), within +-20 so that its exponential stays finite.

    0 outside the mask, whatever stands there.
    """
    difference = torch.where(response_mask.bool(), log_prob - old_log_prob, 0)
    return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def options(config: ActorConfig | None) -> ActorConfig:
    """The options of a loss that cannot do without them."""
    if config is None:
        raise ValueError("this policy loss reads its options from `config`; pass an ActorConfig")
    return config


def clip_range(config: ActorConfig) -> tuple[float, float]:
    """How far the ratio may fall below 1 and rise above it; both are `clip_ratio` unless set."""
    low, high = config.clip_ratio_low, config.clip_ratio_high
    return (
        config.clip_ratio if low is None else low,
        config.clip_ratio if high is None else high,
    )


def clipped_surrogate(
    log_r: Tensor, advantages: Tensor, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """max(-A r, -A clip(r, 1 - low, 1 + high)), with r the ratio, and where the clip won.

    The maximum of two losses is the pessimistic one: a step that already improved the objective
    beyond the range gets no more gradient, a step in the wrong direction always does.
    """
    ratio = log_r.exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    return torch.maximum(plain, clipped), clipped > plain


def aggregate(
    loss: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: ActorConfig | None,
    rollout_is_weights: Tensor | None = None,
) -> Tensor:
    """One number from `loss` (B, T), each token times its weight, divided by the global counts.

    Without counts in `config.global_batch_info` the rows given are taken to be the whole batch.
    """
    if rollout_is_weights is not None:
        loss = loss * rollout_is_weights.detach()
    if config is None:
        return agg_loss(loss, response_mask, loss_agg_mode)
    counts = {"loss_scale_factor": config.loss_scale_factor, **config.global_batch_info}
    return agg_loss(loss, response_mask, loss_agg_mode, **counts)


def token_means(response_mask: Tensor, **values: Tensor) -> dict[str, Tensor]:
    """The mean of each (B, T) value over the response tokens, named `actor/<name>`.

    Every metric of a built-in loss is such a mean, so the metric of a mini-batch is the average of
    its micro-batches weighted by their number of response tokens. The means stay on the device:
    reading them here would make the host wait for the forward pass.
    """
    count = response_mask.sum().clamp(min=1)
    return {
        f"actor/{name}": masked_sum(value.detach(), response_mask) / count
        for name, value in values.items()
    }


def behaviour_metrics(
    log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor, config: ActorConfig
) -> dict[str, Tensor]:
    """How far the trained policy is from the one that sampled each token, whatever policy the loss
    compares it with: the share of ratios outside the clip range, and the KL by k3."""
    low, high = clip_range(config)
    log_r = log_ratio(log_prob, rollout_log_prob, response_mask)
    ratio = log_r.exp()
    return token_means(
        response_mask,
        behaviour_clipfrac=(ratio < 1 - low) | (ratio > 1 + high),
        behaviour_kl=log_r.expm1() - log_r,  # ratio - 1 would round a small one away
    )


Loss = TypeVar("Loss", bound=Callable[..., Any])

Preparation = Callable[..., dict[str, Tensor]]
"""Called with the keywords old_log_prob, log_prob, advantages, response_mask, config."""

_PREPARATIONS: dict[Callable[..., Any], Preparation] = {}


def prepared_by(prepare: Preparation) -> Callable[[Loss], Loss]:
    """Decorator of a policy loss: `prepare` supplies its extra keyword arguments."""

    def declare(loss_fn: Loss) -> Loss:
        _PREPARATIONS[loss_fn] = prepare
        return loss_fn

    return declare


def is_prepared(loss_fn: Callable[..., Any]) -> bool:
    """Whether `loss_fn` wants to see whole mini-batches."""
    return loss_fn in _PREPARATIONS


def prepare_loss(
    loss_fn: Callable[..., Any],
    *,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: ActorConfig,
    log_prob: Tensor | None = None,
) -> dict[str, Tensor]:
    """The columns that `loss_fn` needs of this mini-batch; the tensors are (B, T), all its rows.

    `log_prob` belongs to the policy at the start of this optimizer step. Knowing it costs a forward
    pass over the mini-batch; without it `old_log_prob` is taken, which is the same numbers in the
    first mini-batch of a training step and slightly older ones in the later ones.
    """
    prepare = _PREPARATIONS.get(loss_fn)
    if prepare is None:
        return {}
    return prepare(
        old_log_prob=old_log_prob.detach(),
        log_prob=(old_log_prob if log_prob is None else log_prob).detach(),
        advantages=advantages,
        response_mask=response_mask,
        config=config,
    )

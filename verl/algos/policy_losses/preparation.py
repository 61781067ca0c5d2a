"""What some losses must know of the whole mini-batch before its first micro-batch runs.

A loss that selects tokens by comparing them with all others cannot do so inside a micro-batch. It
is declared with `@prepared_by(prepare)`: `prepare` sees the whole mini-batch once and returns
columns, one row per sequence, which are cut into micro-batches like every other column and come
back to the loss as keyword arguments of the same names.

    columns = prepare_loss(loss_fn, old_log_prob=..., advantages=..., response_mask=..., config=...)
    for rows in micro_batches:
        loss, metrics = loss_fn(..., **{name: column[rows] for name, column in columns.items()})

Most losses need nothing, and then `columns` is empty. The preparation belongs to the function, not
to its name in the registry: a user's loss that replaces a built-in one does not inherit it.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from verl.config.actor import ActorConfig

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

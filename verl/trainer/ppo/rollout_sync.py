"""New weights for a rollout that has ranks of its own.

    trainer                      rollout ranks                    actor ranks
      accept_weights(token) -->    open a port each, serve nothing
      receive_weights       -->    wait for a sender
      send_weights          ---------------------------------->    whole tensors in buckets
                                   verify, serve              <--    to its share of the ports
      compare what was sent with what is held

The token is new for every update, so that nobody else's weights come in, nor those of an earlier
update. An engine that is lost on the way is started again where it was, and everything is sent
once more.
"""

import logging
import secrets
from collections.abc import Sequence
from typing import Any

from verl.single_controller.base.failures import WorkerError, WorkerTimeout

ATTEMPTS = 3
REASON_SECONDS = 10.0
"""How long receivers get to say why they refused, once the sender has failed."""

logger = logging.getLogger(__name__)


def renew_rollout(
    actor: Any, rollout: Any, ranks: Sequence[int] | None = None, *, is_scrambled: bool = False
) -> int:
    """Bring `ranks` of the group `rollout`, or all, to the weights of `actor`; their version then.

    Raises unless all of them hold the sender's fingerprint; until then they generate nothing. A
    probe asks for scrambled weights.
    """
    for _ in range(ATTEMPTS - 1):
        try:
            return send_once(actor, rollout, ranks, is_scrambled)
        except WorkerError as error:
            if all(rollout.rollout_is_alive()):
                raise
            logger.warning("an engine was lost while it was sent weights; sending again: %s", error)
    return send_once(actor, rollout, ranks, is_scrambled)


def send_once(actor: Any, rollout: Any, ranks: Sequence[int] | None, is_scrambled: bool) -> int:
    token = secrets.token_hex(16)
    chosen = None if ranks is None else tuple(ranks)
    addresses = [where for where in rollout.accept_weights(token, chosen) if where is not None]
    receiving = rollout.execute_all_async("receive_weights")
    try:
        answers = actor.send_weights(tuple(addresses), token, is_scrambled)
    except WorkerError:
        tell_reasons(rollout, receiving)
        raise
    sent = {answer for answer in answers if answer is not None}
    held = {answer for answer in rollout.resolve(receiving) if answer is not None}
    if held != sent or len(held) != 1:
        raise RuntimeError(
            f"the actor's ranks sent {sent} (version, fingerprint), and the rollout's hold {held}; "
            "all of them must be the same: the ranks of the actor have drifted apart"
        )
    return held.pop().version


def tell_reasons(rollout: Any, receiving: list[Any]) -> None:
    """Raise what a receiver has to say, if it has ended too; its reason explains the sender's."""
    try:
        rollout.with_deadline(REASON_SECONDS).resolve(receiving)
    except WorkerTimeout:
        logger.error("the weights could not be sent, and the rollout still waits for them")

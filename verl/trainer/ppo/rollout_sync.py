"""New weights for a rollout that has ranks of its own.

    trainer                      rollout ranks                    actor ranks
      accept_weights(token) -->    open a port each, serve nothing
      receive_weights       -->    wait for a sender
      send_weights          ---------------------------------->    whole tensors in buckets
                                   verify, serve              <--    to its share of the ports
      compare what was sent with what is held

The token is new for every update, so that nobody else's weights come in, nor those of an earlier
update.
"""

import logging
import secrets
from typing import Any

from verl.single_controller.base.failures import WorkerError, WorkerTimeout

REASON_SECONDS = 10.0
"""How long receivers get to say why they refused, once the sender has failed."""

logger = logging.getLogger(__name__)


def renew_rollout(actor: Any, rollout: Any) -> int:
    """Bring every rank of the group `rollout` to the weights of `actor`; the version they have.

    Raises unless all of them hold the sender's fingerprint; until then they generate nothing.
    """
    token = secrets.token_hex(16)
    addresses = tuple(rollout.accept_weights(token))
    receiving = rollout.execute_all_async("receive_weights")
    try:
        sent = {answer for answer in actor.send_weights(addresses, token) if answer is not None}
    except WorkerError as error:
        tell_reasons(rollout, receiving, error)
        raise
    held = set(rollout.resolve(receiving))
    if held != sent or len(held) != 1:
        raise RuntimeError(
            f"the actor's ranks sent {sent} (version, fingerprint), and the rollout's hold {held}; "
            "all of them must be the same: the ranks of the actor have drifted apart"
        )
    return held.pop().version


def tell_reasons(rollout: Any, receiving: list[Any], error: WorkerError) -> None:
    """Raise what a receiver has to say, if it has ended too; its reason explains the sender's."""
    try:
        rollout.with_deadline(REASON_SECONDS).resolve(receiving)
    except WorkerTimeout:
        logger.error("the weights could not be sent, and the rollout still waits for them")
    except WorkerError as reason:
        raise reason from error

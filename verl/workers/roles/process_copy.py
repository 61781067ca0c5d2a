"""The weights of an engine that runs in a process of its own, kept up to date by one rank.

    rank 0 (leads engine 0)     rank 1      rank 2 (leads engine 1)     rank 3
      whole tensors  <------ all ranks put them together ------>
      |                                     |
      v                                     v
      engine's process                      engine's process

`tensor_model_parallel_size` consecutive ranks have an engine in common; the first of them starts
it, sends to it and answers for it. An engine that is lost is started again here, and has no weights
until the next update. All ranks decide together whether there is one to send, because those whose
engine is well must still take part in putting tensors together.
"""

import logging
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from verl.utils.distributed import all_reduce_
from verl.workers.engine.base import BaseEngine
from verl.workers.roles.rollout_copy import RolloutCopy
from verl.workers.rollout.base import EngineLostError
from verl.workers.rollout.process.client import EngineProcess
from verl.workers.weight_sync import Published, WeightsNotReadyError, WeightSyncError

ATTEMPTS = 3

logger = logging.getLogger(__name__)


Tensors = Callable[[BaseEngine], Iterator[tuple[str, Tensor]]]


def all_weights(trained: BaseEngine) -> Iterator[tuple[str, Tensor]]:
    return trained.get_per_tensor_param()


class ProcessCopy(RolloutCopy):
    """`process` is None on a rank that leads no engine; `tensors` gives what an update brings."""

    def __init__(self, process: EngineProcess | None, tensors: Tensors = all_weights) -> None:
        self.process = process
        self._tensors = tensors
        self._is_withdrawn = False
        self._failure: Exception | None = None

    @property
    def version(self) -> int:
        if self.process is None:
            raise WeightsNotReadyError("another rank leads this engine; ask that one")
        return self.process.policy_version

    def withdraw(self) -> None:
        self._is_withdrawn = True

    def renew(self, trained: BaseEngine) -> None:
        version = trained.policy_version
        for attempt in range(ATTEMPTS + 1):
            is_behind = not self._holds(version)
            if not is_so_anywhere(is_behind):
                return
            if attempt == ATTEMPTS:
                break
            weights = self._tensors(trained)
            try:
                if is_behind:
                    self.replace(weights, version)
            except (EngineLostError, WeightSyncError) as error:
                logger.warning("version %d did not reach the rollout engine: %s", version, error)
                self._failure = error
            finally:
                use_up(weights)
        raise WeightSyncError(
            f"version {version} was sent {ATTEMPTS} times, and an engine still does not hold it; "
            "nothing is generated with anything else"
        ) from self._failure

    def replace(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Send these weights, whatever the engine holds. Every rank must call it."""
        weights = iter(weights)
        try:
            if self.process is not None:
                self._revive(self.process)
                self.process.update_weights(weights, version)
                self._is_withdrawn = False
        finally:
            use_up(weights)

    def accept(self, token: str, host: str) -> tuple[str, int] | None:
        if self.process is None:
            return None
        self._revive(self.process)
        return self.process.accept_weights(token, host)

    def receive(self, timeout_seconds: float) -> Published:
        assert self.process is not None, "only a rank that accepts receives"
        return self.process.receive_weights()

    def _holds(self, version: int) -> bool:
        """Whether there is nothing to send to this rank's engine."""
        if self.process is None:
            return True
        try:
            is_current = self.process.policy_version == version
        except (EngineLostError, WeightsNotReadyError):
            return False
        return is_current and not self._is_withdrawn

    def _revive(self, process: EngineProcess) -> None:
        """A process that takes weights: alive, and with memory for them."""
        if process.is_alive():
            process.wake_up()
        else:
            logger.warning("the rollout engine's process is gone; starting it again")
            process.restart()


def is_so_anywhere(here: bool) -> bool:
    """Whether it holds on any rank; every rank must ask."""
    return bool(all_reduce_(torch.tensor(int(here)), dist.ReduceOp.MAX))


def use_up(weights: Iterable[object]) -> None:
    """Go through what is left: the other ranks wait for this one's part of every tensor."""
    for _ in weights:
        pass

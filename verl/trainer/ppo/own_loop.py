"""The record of a trainer with a `fit` of its own.

    its fit:  update_actor(batch)   logger.log(metrics, step)
                       |                        |
                       +---> OwnLoopRecord <----+ ---> RunBoard: run page, /metrics

Such a loop tells us neither when a step ends nor what it trained on. A step ends where it logs
with a `Tracking` of the run's project and experiment; its batches are those that the actor was
given since the step before. A `fit` that calls ours inside is recorded by ours.
"""

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import MethodType
from typing import Any

from verl.board.live import RunBoard
from verl.board.recorder import REQUIRED_ARRAYS, REQUIRED_TENSORS
from verl.protocol import DataProto
from verl.trainer.common import StageClock
from verl.utils.tracking import TrackingBackend, listening

logger = logging.getLogger(__name__)

TIMING = "timing_s/"


class OwnLoopRecord(TrackingBackend):
    """Listens to the trackers of a run while its `fit` runs."""

    def __init__(self, board: RunBoard, project_name: str, experiment_name: str) -> None:
        super().__init__(project_name, experiment_name)
        self._board = board
        self._stack, self._name = ExitStack(), ""
        self._has_opened = False
        self._clock = StageClock()
        self._batches: list[DataProto] = []
        self._has_samples = False
        self._last: tuple[int, dict[str, Any], dict[str, float]] = (-1, {}, {})

    def run(self, fit: MethodType) -> None:
        self._name = f"{fit.__module__}.{fit.__qualname__}"
        with self._stack, listening(self):
            fit()
        if not self._has_samples and (self._has_opened or not self._board.was_opened):
            seen = "metrics alone are" if self._has_opened else "nothing is"
            logger.warning(
                "%s recorded of this run: its trainer has a fit of its own, which is followed "
                "through Tracking(%r, %r).log and actor_rollout_wg.update_actor(DataProto)",
                *(seen, self.project_name, self.experiment_name),
            )

    def observed(self, update_actor: Callable[..., Any]) -> Callable[..., Any]:
        """The same method, whose batches are kept until the step is logged."""

        def update(batch: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(batch, DataProto) and is_complete(batch):
                tensors, arrays = list(batch.batch.keys()), list(batch.non_tensor_batch)
                self._batches.append(batch.select(tensors, arrays))
            return update_actor(batch, *args, **kwargs)

        return update

    def log(self, data: Mapping[str, Any], step: int) -> None:
        if not self._has_opened:
            if self._board.was_opened:  # by our loop, which runs inside this one
                return
            self._board.foreign_loop = self._name
            self._stack.enter_context(self._board)
            self._has_opened = True
        batches, self._batches = self._batches, []
        timing = {
            name.removeprefix(TIMING): value
            for name, value in data.items()
            if name.startswith(TIMING)
        }
        seconds, metrics = self._clock.shares(timing), dict(data)
        if step == self._last[0]:  # validation may be logged apart
            _, before, spent = self._last
            metrics = {**before, **metrics}
            seconds = {
                name: seconds.get(name, 0.0) + spent.get(name, 0.0) for name in {**spent, **seconds}
            }
        self._last = (step, metrics, seconds)
        self._has_samples |= bool(batches)
        batch = DataProto.concat(batches) if batches else None
        self._board.add_step(step, metrics, seconds, batch=batch)


def is_complete(batch: DataProto) -> bool:
    """Whether the batch has what a sample of the store is made of."""
    has_tensors = set(batch.batch.keys()) >= REQUIRED_TENSORS
    return has_tensors and set(batch.non_tensor_batch) >= REQUIRED_ARRAYS

"""Responses are graded as soon as they end, while others are still generated.

    event loop of the rollout               grading thread
      trajectories end: add          ---->    the reward manager judges each
      ...
      all have ended: finish waits   <----    the last grades

Trajectories that end in one turn of the event loop reach the reward manager as one batch.
"""

import asyncio
from collections.abc import Hashable, Iterable, Sequence

from verl.protocol.padded import Padding, padded_batch
from verl.protocol.trajectory import Trajectory
from verl.workers.reward_manager.grading import PerResponseManager


class GradedGeneration:
    """Grades the trajectories of one generation."""

    def __init__(self, manager: PerResponseManager, padding: Padding) -> None:
        self._manager = manager
        self._padding = padding
        self._round = manager.open_round()
        self._added: list[Trajectory] = []
        self._num_handed_over = 0
        self._error: Exception | None = None

    def add(self, trajectory: Trajectory) -> None:
        """Grade a trajectory, together with all that end in this turn of the event loop."""
        self._added.append(trajectory)
        if len(self._added) == self._num_handed_over + 1:
            asyncio.get_running_loop().call_soon(self._hand_over)

    def _hand_over(self) -> None:
        start, self._num_handed_over = self._num_handed_over, len(self._added)
        if start == self._num_handed_over:
            return
        places = {id(t): place for place, t in enumerate(self._added[start:], start)}
        try:
            for alike in by_columns(self._added[start:]):
                responses = self._manager.responses(padded_batch(alike, self._padding))
                numbers = [places[id(trajectory)] for trajectory in alike]
                self._round.add_all(zip(numbers, responses, strict=True))
        except Exception as error:  # raised by `finish`
            self._error = error

    async def finish(self) -> None:
        """Wait for the last grades."""
        if self._error is None and self._num_handed_over < len(self._added):
            self._hand_over()
        if self._error is not None:
            raise self._error
        grades = await asyncio.to_thread(self._round.grades)
        for trajectory, grade in zip(self._added, grades, strict=True):
            trajectory.grade = grade

    def cancel(self) -> None:
        self._num_handed_over = len(self._added)  # they may not have been handed over yet
        self._round.cancel()


def by_columns(trajectories: Sequence[Trajectory]) -> Iterable[list[Trajectory]]:
    """Trajectories that bring the same columns: none is to miss what others have."""
    parts: dict[Hashable, list[Trajectory]] = {}
    for trajectory in trajectories:
        parts.setdefault(frozenset(trajectory.extra_fields), []).append(trajectory)
    return parts.values()

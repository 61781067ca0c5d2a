"""Responses are graded as soon as they end, while others are still generated.

    event loop of the engines               grading thread
      some loops end: add their rows  ---->   the reward manager judges each
      ...
      all loops have ended: wait for  <----   the last grades

Responses that end in one turn of the event loop reach the reward manager as one batch, which costs
far less than a batch for each. It has the columns of their rows of the whole batch, so the grades
are those they would get afterwards. The grades travel with the batch in a column of their own; what
becomes of faults and abstentions is decided where batches are scored.
"""

import asyncio
import time
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from verl.agent_loop.base import AgentLoopOutput
from verl.agent_loop.follower import AsBatch, EndedRow, Follower, batch_of
from verl.protocol import DataProto
from verl.workers.reward_manager.grader import GRADE_COLUMN, as_result
from verl.workers.reward_manager.grading import PerResponseManager


class GradedGeneration(Follower):
    """The responses to one batch of prompts. `as_batch` makes a batch of trajectories."""

    def __init__(self, manager: PerResponseManager, as_batch: AsBatch) -> None:
        self._manager = manager
        self._as_batch = as_batch
        self._round = manager.open_round()
        self._ended: list[EndedRow] = []
        self._handing_over: asyncio.Task[None] | None = None

    async def add(self, place: int, row: Mapping[str, Any], output: AgentLoopOutput) -> None:
        """Grade the trajectory of a row, unless its loop has scored it."""
        if output.reward_score is not None:
            return
        self._ended.append(EndedRow(place, row, output))
        if self._handing_over is None:  # it runs after everything that is ready now
            self._handing_over = asyncio.create_task(self._hand_over())
        await asyncio.shield(self._handing_over)

    async def _hand_over(self) -> None:
        """Give the manager what has ended since the last time."""
        ended, self._ended, self._handing_over = self._ended, [], None
        for rows in alike(ended):
            responses = self._manager.responses(batch_of(rows, self._as_batch))
            places = [row.place for row in rows]
            self._round.add_all(zip(places, responses, strict=True))

    async def finish(self, batch: DataProto) -> None:
        """Wait for the last grades and put all of them into the batch."""
        start = time.perf_counter()
        grades = await asyncio.to_thread(self._round.grades)
        batch.meta_info["timing"]["reward_wait"] = time.perf_counter() - start
        if len(grades) < len(batch):  # loops score all of a batch or nothing
            return
        column = np.empty(len(batch), dtype=object)
        column[:] = [as_result(grade) for grade in grades]
        batch.non_tensor_batch[GRADE_COLUMN] = column

    def cancel(self) -> None:
        self._ended.clear()  # they may not have been handed over yet
        self._round.cancel()


def alike(rows: Sequence[EndedRow]) -> Iterable[list[EndedRow]]:
    """The rows whose trajectories bring the same columns: none is to miss what others have."""
    groups: dict[Hashable, list[EndedRow]] = {}
    for row in rows:
        columns = frozenset(row.output.extra_fields), row.output.response_logprobs is None
        groups.setdefault(columns, []).append(row)
    return groups.values()

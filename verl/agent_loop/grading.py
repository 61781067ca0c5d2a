"""Responses are graded as soon as they end, while others are still generated.

Responses that end in one turn of the event loop are handed to the grading service together, which
costs far less than one by one. The grades travel with the batch in a column of their own.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from verl.agent_loop.base import AgentLoopOutput
from verl.agent_loop.follower import AsBatch, EndedRow, Follower, batch_of
from verl.protocol import DataProto
from verl.protocol.trajectory import Segment, Trajectory
from verl.workers.reward_manager.adapters import ToBatch
from verl.workers.reward_manager.service import GradingService

GRADE_COLUMN = "__grade__"
"""Grades of responses that were graded while they were generated."""


@dataclass(kw_only=True)
class EndedTrajectory(Trajectory):
    """A trajectory with the output of its loop; `sample` is the number of its row."""

    output: AgentLoopOutput


class GradedGeneration(Follower):
    """The responses to one batch of prompts; `response_length` is where they are cut."""

    def __init__(self, service: GradingService, response_length: int) -> None:
        self._service = service
        self._response_length = response_length
        self._trajectories: list[EndedTrajectory] = []
        self._ended: list[EndedTrajectory] = []
        self._handing_over: asyncio.Task[None] | None = None

    async def add(self, place: int, row: Mapping[str, Any], output: AgentLoopOutput) -> None:
        """Grade the trajectory of a row, unless its loop has scored it."""
        if output.reward_score is not None:
            return
        response = output.response_ids[: self._response_length]
        trajectory = EndedTrajectory(
            uid=str(row.get("uid", place)),
            sample=place,
            row=row,
            segments=[
                Segment(author="template", token_ids=output.prompt_ids),
                Segment(author="model", token_ids=response, is_trained=True, parent=0),
            ],
            num_turns=output.num_turns,
            extra_fields=output.extra_fields,
            output=output,
        )
        self._ended.append(trajectory)
        if self._handing_over is None:  # it runs after everything that is ready now
            self._handing_over = asyncio.create_task(self._hand_over())

    async def _hand_over(self) -> None:
        ended, self._ended, self._handing_over = self._ended, [], None
        self._trajectories += ended
        self._service.submit(ended)

    async def finish(self, batch: DataProto) -> None:
        """Wait for the last grades and put all of them into the batch."""
        start = time.perf_counter()
        await self._hand_over()
        await asyncio.wrap_future(self._service.grade_once(self._trajectories))
        batch.meta_info["timing"]["reward_wait"] = time.perf_counter() - start
        if len(self._trajectories) < len(batch):  # loops score all of a batch or nothing
            return
        column = np.empty(len(batch), dtype=object)
        for trajectory in self._trajectories:
            column[trajectory.sample] = trajectory.grade
        batch.non_tensor_batch[GRADE_COLUMN] = column

    def cancel(self) -> None:
        self._ended.clear()  # they may not have been handed over yet
        self._service.cancel()


def to_batch_with(as_batch: AsBatch) -> ToBatch:
    """Makes batches of ended trajectories, with the columns of their rows."""

    def to_batch(trajectories: Sequence[Trajectory]) -> DataProto:
        ended = [t for t in trajectories if isinstance(t, EndedTrajectory)]
        return batch_of([EndedRow(t.sample, t.row, t.output) for t in ended], as_batch)

    return to_batch

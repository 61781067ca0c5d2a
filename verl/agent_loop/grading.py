"""Responses are graded as soon as they end, while others are still generated.

    event loop of the engines               grading thread
      a loop ends: add its row  ---------->   the reward manager judges it
      ...
      all loops have ended: wait for  <----   the last grades

A response reaches the reward manager as a batch of one that has the same columns as its row of the
whole batch, so its grade is the one it would get afterwards. The grades travel with the batch in a
column of their own; what becomes of faults and abstentions is decided where batches are scored.
"""

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from verl.agent_loop.base import AgentLoopOutput
from verl.agent_loop.follower import AsBatch, Follower, with_row_columns
from verl.protocol import DataProto
from verl.workers.reward_manager.grading import PerResponseManager
from verl.workers.reward_manager.results import GRADE_COLUMN, as_result


class GradedGeneration(Follower):
    """The responses to one batch of prompts. `as_batch` makes a batch of trajectories."""

    def __init__(self, manager: PerResponseManager, as_batch: AsBatch) -> None:
        self._manager = manager
        self._as_batch = as_batch
        self._round = manager.open_round()

    def add(self, place: int, row: Mapping[str, Any], output: AgentLoopOutput) -> None:
        """Grade the trajectory of a row, unless its loop has scored it."""
        if output.reward_score is not None:
            return
        (response,) = self._manager.responses(with_row_columns(self._as_batch([output]), [row]))
        self._round.add(place, response)

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
        self._round.cancel()

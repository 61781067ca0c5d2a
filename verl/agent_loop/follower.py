"""Something that goes along with a generation and is told of each trajectory when it has ended."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from verl.agent_loop.base import AgentLoopOutput
from verl.protocol import DataProto


@dataclass(frozen=True)
class EndedRow:
    """A trajectory and the row of the batch that it belongs to."""

    place: int
    columns: Mapping[str, Any]
    output: AgentLoopOutput


AsBatch = Callable[[Sequence[AgentLoopOutput]], DataProto]
"""Makes a batch of trajectories, without the columns of their rows."""


class Follower(ABC):
    """Called on the event loop that generates, so it must not block for long."""

    @abstractmethod
    async def add(self, place: int, row: Mapping[str, Any], output: AgentLoopOutput) -> None:
        """The loop of the row at `place` of the batch has ended."""

    @abstractmethod
    async def finish(self, batch: DataProto) -> None:
        """All loops have ended, `batch` being their trajectories in the order of the rows."""

    @abstractmethod
    def cancel(self) -> None:
        """The generation has failed: leave what is not done."""


MakeFollower = Callable[[AsBatch], Follower]


def batch_of(rows: Sequence[EndedRow], as_batch: AsBatch) -> DataProto:
    """The trajectories with the columns of their rows."""
    return with_row_columns(as_batch([row.output for row in rows]), [row.columns for row in rows])


def with_row_columns(batch: DataProto, rows: Sequence[Mapping[str, Any]]) -> DataProto:
    """The batch with the columns of its rows; what the trajectories say themselves comes first."""
    for name in rows[0]:
        column = np.empty(len(rows), dtype=object)
        for place, row in enumerate(rows):  # a slice would take equally long lists for a matrix
            column[place] = row[name]
        batch.non_tensor_batch.setdefault(name, column)
    return batch

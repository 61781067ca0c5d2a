"""Batches that the driver steers without holding them.

    future = rollout.generate(prompts)                 # blocking=False: rows stay where they are
    batch = by_reference(rollout, future, lengths_of)  # the driver learns a few numbers per row
    actor.update(batch.take(order))                    # each rank fetches its own rows

What the driver holds is `known` (lengths, rewards, labels) and, for each row, in which part it lies
and where. It can order, select and split rows, and add columns that it computed. A worker gets the
references of the parts that its rows lie in and nothing of the others; the rows go from worker to
worker. The driver's work and traffic then depend on the number of rows, not on their tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.protocol import BatchError, DataProto, DataProtoFuture
from verl.single_controller.base.backend import Share
from verl.single_controller.base.dispatch import require_divisible, split
from verl.single_controller.base.futures import GroupFuture

if TYPE_CHECKING:
    from verl.single_controller.base.worker_group import WorkerGroup


@dataclass(frozen=True, eq=False)
class BatchByReference:
    """Rows that lie elsewhere, and what the driver knows of them."""

    known: DataProto
    """One row per row: columns that the driver reads, or has computed."""

    parts: list[Any]
    """References, as the back-end delivers them."""

    places: np.ndarray
    """(B, 2): for each row its part, and its row there."""

    def __len__(self) -> int:
        return len(self.places)

    def take(self, rows: Sequence[int] | np.ndarray) -> "BatchByReference":
        """These rows, in this order."""
        chosen = np.asarray(rows, dtype=np.int64)
        return replace(self, known=self.known.select_idxs(chosen), places=self.places[chosen])

    def union(self, columns: DataProto) -> "BatchByReference":
        """The same rows with further columns, which travel from the driver."""
        return replace(self, known=self.known.select().union(columns))

    def as_future(self) -> DataProtoFuture:
        """What a worker is given: references of the parts it needs, and how to pick its rows."""
        needed, local = np.unique(self.places[:, 0], return_inverse=True)
        places = np.stack([local, self.places[:, 1]], axis=1)
        return DataProtoFuture(
            collect_fn=partial(gather_rows, places=places, known=self.known),
            futures=[self.parts[number] for number in needed],
        )

    def get(self, timeout_seconds: float) -> DataProto:
        """Fetch all rows to the driver."""
        return self.as_future().get(timeout_seconds)


def by_reference(
    group: "WorkerGroup", future: GroupFuture, describe: Callable[[Any, DataProto], DataProto]
) -> BatchByReference:
    """Wait for `future`, a result of `group`, and learn what `describe` tells of each row.

    `describe(worker, part)` runs on the rank that holds the part and returns one row per row of it:
    a few numbers, which are all that comes to the driver. It is a function of an importable module.
    """
    assert future.positions is not None
    shares = [
        Share(rank, (describe, DataProtoFuture.concat([part])), {})
        for rank, part in zip(future.positions, future.futures, strict=True)
    ]
    known = group.execute_shares("execute_with_func_generator", shares)
    places = [
        np.stack([np.full(len(rows), number), np.arange(len(rows))], axis=1)
        for number, rows in enumerate(known)
    ]
    return BatchByReference(DataProto.concat(known), list(future.futures), np.concatenate(places))


def gather_rows(parts: list[Any], places: np.ndarray, known: DataProto) -> DataProto:
    """On the worker: pick rows out of their parts, in the order of `places`, and add `known`."""
    picked = [
        part.select_idxs(places[places[:, 0] == number, 1]) for number, part in enumerate(parts)
    ]
    rows = DataProto.concat(picked)
    by_part = np.argsort(places[:, 0], kind="stable")  # the order in which they were picked
    rows.reorder(np.argsort(by_part, kind="stable"))
    return rows.union(known)


@split.register
def _(batch: BatchByReference, parts: int) -> list[Any]:
    require_divisible(len(batch), parts)
    if not len(batch):
        raise BatchError(f"a batch without rows cannot be split over {parts} ranks")
    places = np.split(batch.places, parts)
    return [
        BatchByReference(known, batch.parts, own).as_future()
        for known, own in zip(batch.known.chunk(parts), places, strict=True)
    ]

"""Batches that workers are still computing, as results and as arguments.

`GroupFuture` is what a non-blocking call returns. On the driver it is waited for like a blocking
call: all ranks of the call are watched, and the first failure is raised at once.

As an argument a future is waited for by the back-end, not by the worker: `expand_futures` puts its
parts beside the other arguments as keywords, in the form in which a back-end delivers references
(Ray resolves them, the local back-end forwards the packed result), and on the worker
`resolve_futures` joins them. So a worker never blocks on another one, and an error in a part fails
the call before it starts.

A batch whose rows the driver must order or split, but not read, stays on the workers:

    future = rollout.generate(prompts)                 # blocking=False: rows stay where they are
    batch = by_reference(rollout, future, lengths_of)  # the driver learns a few numbers per row
    actor.update(batch.take(order))                    # each rank fetches its own rows

The driver holds `known` (lengths, rewards, labels) and, for each row, its part and its index there.
A worker gets the references of the parts that hold its rows, and the rows go from worker to worker:
the driver's work and traffic depend on the number of rows, not on their tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.protocol import BatchError, DataProto, DataProtoFuture
from verl.single_controller.base.backend import Call, RankCall
from verl.single_controller.base.dispatch import require_divisible, split

if TYPE_CHECKING:
    from verl.single_controller.base.worker_group import WorkerGroup


PREFIX = "_part_of_future_"

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(eq=False)
class GroupFuture(DataProtoFuture):
    """A `DataProtoFuture` that knows its call. Sent elsewhere it is a plain one."""

    references: list[Any] | None = None
    """One per rank of the call; `futures` are those of them that hold parts of the batch."""

    positions: list[int] | None = None
    """Where `futures` are among `references`."""

    resolve: Callable[[list[Any], Call | None], list[Any]] | None = None
    call: Call | None = None

    def get(self, timeout_seconds: float | None = None) -> Any:
        """Wait, by default until the call's deadline, join the parts and take this rank's rows."""
        assert self.references is not None
        assert self.positions is not None
        assert self.resolve is not None
        call = self.call
        if call is not None and timeout_seconds is not None:
            call = Call(call.group, call.method, timeout_seconds)
        values = self.resolve(self.references, call)
        batch = self.collect_fn([values[position] for position in self.positions])
        return batch if self.dispatch_fn is None else self.dispatch_fn(batch)

    def __reduce__(self) -> tuple[Any, ...]:
        return DataProtoFuture, (self.collect_fn, self.futures, self.dispatch_fn)


@dataclass(frozen=True)
class PartsOf:
    """Stands for a future whose parts arrive as keyword arguments."""

    future: DataProtoFuture
    names: tuple[str, ...]


def expand_futures(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Replace each future by its parts; runs on the driver."""
    if not any(isinstance(arg, DataProtoFuture) for arg in (*args, *kwargs.values())):
        return args, kwargs
    parts: dict[str, Any] = {}

    def stand_in(arg: Any) -> Any:
        if not isinstance(arg, DataProtoFuture):
            return arg
        names = tuple(f"{PREFIX}{len(parts) + i}" for i in range(len(arg.futures)))
        parts.update(zip(names, arg.futures, strict=True))
        return PartsOf(DataProtoFuture(arg.collect_fn, [], arg.dispatch_fn), names)

    expanded = tuple(stand_in(arg) for arg in args)
    keywords = {key: stand_in(arg) for key, arg in kwargs.items()}
    return expanded, {**keywords, **parts}


def resolve_futures(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Replace each stand-in by its batch; runs on the worker."""
    parts = {key: value for key, value in kwargs.items() if key.startswith(PREFIX)}
    if not parts:
        return args, kwargs

    def batch(arg: Any) -> Any:
        if not isinstance(arg, PartsOf):
            return arg
        whole = arg.future.collect_fn([parts[name] for name in arg.names])
        take_share = arg.future.dispatch_fn
        return whole if take_share is None else take_share(whole)

    own = {key: batch(value) for key, value in kwargs.items() if key not in parts}
    return tuple(batch(arg) for arg in args), own


@dataclass(frozen=True, eq=False)
class BatchByReference:
    """Rows held by workers, and the columns of them that the driver has."""

    known: DataProto
    """One row per row: columns that the driver reads, or has computed."""

    parts: list[Any]
    """References, as the back-end delivers them."""

    indices: np.ndarray
    """(B, 2): for each row the index of its part, and of the row in it."""

    def __len__(self) -> int:
        return len(self.indices)

    def take(self, rows: Sequence[int] | np.ndarray) -> "BatchByReference":
        """These rows, in this order."""
        chosen = np.asarray(rows, dtype=np.int64)
        return replace(self, known=self.known.select_idxs(chosen), indices=self.indices[chosen])

    def union(self, columns: DataProto) -> "BatchByReference":
        """The same rows with further columns, which travel from the driver."""
        return replace(self, known=self.known.select().union(columns))

    def as_future(self) -> DataProtoFuture:
        """What a worker is given: references of the parts it needs, and how to pick its rows."""
        needed, local = np.unique(self.indices[:, 0], return_inverse=True)
        indices = np.stack([local, self.indices[:, 1]], axis=1)
        return DataProtoFuture(
            collect_fn=partial(gather_rows, indices=indices, known=self.known),
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
    rank_calls = [
        RankCall(rank, (describe, DataProtoFuture.concat([part])), {})
        for rank, part in zip(future.positions, future.futures, strict=True)
    ]
    known = group.execute_rank_calls("execute_with_func_generator", rank_calls)
    indices = [
        np.stack([np.full(len(rows), number), np.arange(len(rows))], axis=1)
        for number, rows in enumerate(known)
    ]
    return BatchByReference(DataProto.concat(known), list(future.futures), np.concatenate(indices))


def gather_rows(parts: list[Any], indices: np.ndarray, known: DataProto) -> DataProto:
    """On the worker: pick rows out of their parts, in the order of `indices`, and add `known`."""
    picked = [
        part.select_idxs(indices[indices[:, 0] == number, 1]) for number, part in enumerate(parts)
    ]
    rows = DataProto.concat(picked)
    by_part = np.argsort(indices[:, 0], kind="stable")  # the order in which they were picked
    rows.reorder(np.argsort(by_part, kind="stable"))
    return rows.union(known)


@split.register
def _(batch: BatchByReference, parts: int) -> list[Any]:
    require_divisible(len(batch), parts)
    if not len(batch):
        raise BatchError(f"a batch without rows cannot be split over {parts} ranks")
    indices = np.split(batch.indices, parts)
    return [
        BatchByReference(known, batch.parts, chunk).as_future()
        for known, chunk in zip(batch.known.chunk(parts), indices, strict=True)
    ]

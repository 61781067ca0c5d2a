"""`StoredBatch`: a batch whose columns lie in a data plane; the driver has lengths and labels.

    driver                                 plane                      ranks
      store_batch: columns ------------->  keys of a step
      known: lengths, uids, meta_info
      group.compute_log_prob(stored) --- keys and rows, no columns -->  get their rows and fields
                                           new keys  <----------------  put what they computed
      joined: keys of the ranks  <--- lengths and scalars -----------

It has the members of a `DataProto` that dispatch needs (`batch`, `non_tensor_batch`, `meta_info`,
`select_idxs`, `chunk`), which show what the driver knows. A *source* says of some fields under
which keys they are, and for each row of the batch which key and which row of it. Rows are chosen
and reordered by changing these numbers. `fetch` makes a `DataProto`, without a copy where one key
holds the rows in their order and the plane is in process.

`tqbridge` decorates a method of a worker: it gets the rows, its answer goes into the plane.
"""

import inspect
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from verl.data_plane import DataPlane, connect, planes
from verl.protocol import DataProto
from verl.single_controller.base.decorator import PLAIN_METHOD
from verl.single_controller.base.dispatch import (
    is_reference,
    join,
    map_arguments,
    narrow,
    require_divisible,
    split,
)

ROW_COLUMN = "row_of_batch"
"""Which row of the caller's batch an entry is; the driver sorts by it."""

Method = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class Source:
    fields: tuple[str, ...]
    keys: tuple[str, ...]
    indices: np.ndarray
    """(B, 2): for each row of the batch the number of its key, and of the row there."""


@dataclass(eq=False)
class StoredBatch:
    address: Mapping[str, Any]
    partition: str
    known: DataProto
    sources: tuple[Source, ...]

    def __len__(self) -> int:
        return len(self.sources[0].indices)

    @property
    def batch(self) -> TensorDict:
        """The columns that the driver has: numbers of tokens, of prompts, of rows."""
        return self.known.batch

    @property
    def non_tensor_batch(self) -> dict[str, np.ndarray]:
        return self.known.non_tensor_batch

    @property
    def meta_info(self) -> dict[str, Any]:
        return self.known.meta_info

    @meta_info.setter
    def meta_info(self, entries: dict[str, Any]) -> None:
        self.known.meta_info = entries

    @property
    def fields(self) -> list[str]:
        return [name for source in self.sources for name in source.fields]

    def select_fields(self, fields: Sequence[str]) -> "StoredBatch":
        """The same rows with those of the fields that there are; sources that have none go."""
        narrowed = [
            replace(source, fields=tuple(name for name in source.fields if name in fields))
            for source in self.sources
        ]
        return replace(self, sources=tuple(source for source in narrowed if source.fields))

    def without_labels(self) -> "StoredBatch":
        """Without what only the driver reads."""
        return replace(
            self, known=DataProto(batch=self.batch.copy(), meta_info=dict(self.meta_info))
        )

    def select_idxs(self, rows: Sequence[int] | np.ndarray | Tensor) -> "StoredBatch":
        """These rows, in this order."""
        chosen = np.asarray(rows, dtype=np.int64)
        sources = [replace(source, indices=source.indices[chosen]) for source in self.sources]
        return replace(self, known=self.known.select_idxs(chosen), sources=tuple(sources))

    def chunk(self, chunks: int) -> "list[StoredBatch]":
        require_divisible(len(self), chunks)
        parts = np.split(np.arange(len(self)), chunks)
        return [self.select_idxs(rows) for rows in parts]

    def union(self, other: "StoredBatch") -> "StoredBatch":
        """The same rows with further columns; those of `other` replace those of the same name."""
        assert len(self) == len(other)
        kept = self.select_fields([name for name in self.fields if name not in other.fields])
        known = self.known.union(other.known)
        return replace(self, known=known, sources=(*kept.sources, *other.sources))

    def fetch(self, fields: Sequence[str] | None = None) -> DataProto:
        """The rows themselves; runs where they are needed."""
        plane, columns = connected(self.address), dict(self.known.batch.items())
        for source in self.sources:
            names = [name for name in source.fields if fields is None or name in fields]
            numbers, local = np.unique(source.indices[:, 0], return_inverse=True)
            parts = plane.get([source.keys[number] for number in numbers], names) if names else []
            for name in names:
                tensors: list[Any] = [part[name] for part in parts]
                columns[name] = gathered(tensors, local, source.indices[:, 1])
        return DataProto(
            batch=TensorDict(columns, batch_size=[len(self)]),
            non_tensor_batch=dict(self.non_tensor_batch),
            meta_info=dict(self.meta_info),
        )


def gathered(parts: list[Tensor], numbers: np.ndarray, rows: np.ndarray) -> Tensor:
    """Row `rows[i]` of part `numbers[i]`, for every i; the part itself where that is all of it."""
    starts = np.cumsum([0, *(len(part) for part in parts)])
    places = starts[numbers] + rows
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    is_all = len(places) == len(whole) and bool((places == np.arange(len(whole))).all())
    return whole if is_all else whole[torch.from_numpy(places)]


def store_batch(
    plane: DataPlane, partition: str, batch: DataProto, known: DataProto, num_parts: int
) -> StoredBatch:
    """Put the tensors of a batch, in so many keys of consecutive rows."""
    parts = np.array_split(np.arange(len(batch)), max(1, min(num_parts, len(batch))))
    keys, indices = [], []
    for number, rows in enumerate(parts):
        first, end = int(rows[0]), int(rows[-1]) + 1
        columns = {name: column[first:end] for name, column in batch.batch.items()}
        keys.append(plane.put(f"{partition}/rows-{number}", columns).key)
        indices.append(np.stack([np.full(len(rows), number), rows - first], axis=1))
    source = Source(tuple(batch.batch.keys()), tuple(keys), np.concatenate(indices))
    return StoredBatch(plane.address(), partition, known, (source,))


def put_columns(stored: StoredBatch, what: str, columns: DataProto) -> StoredBatch:
    """Put what was computed for the rows of a batch, and refer to it; metrics go as they are."""
    plane, key = connected(stored.address), f"{stored.partition}/{what}-{uuid.uuid4().hex[:12]}"
    tensors = {name: column for name, column in columns.batch.items() if name != ROW_COLUMN}
    plane.put(key, tensors)
    rows = np.arange(len(columns))
    indices = np.stack([np.zeros_like(rows), rows], axis=1)
    numbers = {name: columns.batch[name] for name in columns.batch.keys() if name == ROW_COLUMN}  # noqa: SIM118
    known = DataProto(
        batch=TensorDict(numbers, batch_size=[len(rows)]), meta_info=columns.meta_info
    )
    source = Source(tuple(tensors), (key,), indices)
    return StoredBatch(stored.address, stored.partition, known, (source,))


_CONNECTED: dict[str, DataPlane] = {}


def connected(address: Mapping[str, Any]) -> DataPlane:
    """The plane of an address; a process keeps its connection."""
    name = address["name"]
    if name not in _CONNECTED:
        _CONNECTED[name] = connect(address)
    return _CONNECTED[name]


def disconnect(name: str) -> None:
    _CONNECTED.pop(name, None)


# ---- on the way to the ranks and back ------------------------------------------------------------


@is_reference.register
def _(arg: StoredBatch) -> bool:
    return True


@split.register
def _(batch: StoredBatch, parts: int) -> list[Any]:
    return [replace(batch)] if parts == 1 else batch.chunk(parts)


@narrow.register
def _(arg: StoredBatch, columns: Sequence[str]) -> Any:
    return arg.select_fields(columns)


@join.register
def _(first: StoredBatch, parts: Sequence[Any]) -> Any:
    keys: list[str] = []
    indices: list[np.ndarray] = []
    for part in parts:
        (source,) = part.sources
        indices.append(source.indices + np.array([len(keys), 0]))
        keys.extend(source.keys)
    source = Source(first.sources[0].fields, tuple(keys), np.concatenate(indices))
    known = join(first.known, [part.known for part in parts])
    return replace(first, known=known, sources=(source,))


def tqbridge(
    *_: Any, put_data: bool = True, **__: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let a worker's method take batches that are stored.

    `@tqbridge()` below `@register(...)`: the method gets the rows of each `StoredBatch` among its
    arguments as a `DataProto`, and the columns that it returns go into the plane unless `put_data`
    is false. Called with anything else it is the method. Other arguments of verl's decorator are
    accepted: how a batch is dispatched is said once, by `register`.
    """

    def decorate(method: Method) -> Method:
        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            stored = first_stored(args, kwargs)
            args, kwargs = map_arguments(rows_of, args, kwargs)
            return answer_for(stored, method, method(*args, **kwargs), put_data)

        @wraps(method)
        async def call_async(*args: Any, **kwargs: Any) -> Any:
            stored = first_stored(args, kwargs)
            args, kwargs = map_arguments(rows_of, args, kwargs)
            return answer_for(stored, method, await method(*args, **kwargs), put_data)

        wrapper = call_async if inspect.iscoroutinefunction(method) else call
        vars(wrapper)[PLAIN_METHOD] = wrapper, method
        return wrapper

    return decorate


def first_stored(args: tuple[Any, ...], kwargs: dict[str, Any]) -> StoredBatch | None:
    found = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, StoredBatch)]
    return found[0] if found else None


def rows_of(arg: Any) -> Any:
    return arg.fetch() if isinstance(arg, StoredBatch) else arg


def answer_for(stored: StoredBatch | None, method: Method, answer: Any, put_data: bool) -> Any:
    has_columns = isinstance(answer, DataProto) and answer.batch is not None
    if stored is None or not put_data or not has_columns:
        return answer
    return put_columns(stored, method.__name__, answer)


def create_transferqueue_client(*_: Any, **__: Any) -> Any:
    """The client of the package TransferQueue in this process, for code that uses the package
    itself. Stored batches need none: they bring the address of their plane."""
    return planes["transfer_queue"].client()


get_transferqueue_client = create_transferqueue_client

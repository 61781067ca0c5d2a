"""`DataPlane`: rows that producers put and consumers take, by key.

A key names some rows (a group of trajectories, or a column that a rank has computed), a *partition*
is the part of the key before its last "/" (`"step-3/12"` is in `"step-3"`), and columns are tensors
and arrays with one entry per row. Columns stay where the back-end keeps them; what everybody may
ask for is a `Receipt`: lengths, types and scalars.

    producer:  reserve(key)          the rows will come: the entry is open
               put(key, columns)     they are there, once and for all: the entry is complete
    consumer:  wait(...)             returns when enough entries are complete; wakes once
               take(consumer, n)     n entries that no consumer of that name was given before
               get(keys, fields)     the columns themselves
    anybody:   entries(partition), delete(keys)

A producer that ends without completing what it reserved leaves *lost* entries: `entries` shows
them, and who waits for one is told at once, with the name of the producer.

Values are plain data: dense tensors, arrays of numbers or text, and object arrays or lists of what
JSON can hold, tensors and arrays included. Anything else is refused by `put`, in every back-end, so
no back-end has to unpickle what it cannot know.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

Column: TypeAlias = "Tensor | np.ndarray | list[Any]"
Columns: TypeAlias = dict[str, Column]
Scalar: TypeAlias = "str | int | float | bool | None"
State: TypeAlias = Literal["open", "complete", "lost"]

_PLAIN = (str, int, float, bool, bytes, type(None), np.generic)
_MAX_DEPTH = 64


class PlaneError(RuntimeError):
    """The data plane cannot do what was asked."""


class KeyTaken(PlaneError, ValueError):
    """A key was put, or reserved, twice."""


class RowsMissing(PlaneError, LookupError):
    """Keys or fields that are not there, or not complete."""


class RowsLost(PlaneError):
    """Rows whose producer ended before it completed them."""


class PlaneFull(PlaneError):
    """A limit of the data plane would be passed."""


class PlaneTimeout(PlaneError, TimeoutError):
    """What was waited for did not come in time."""


class PlaneLost(PlaneError):
    """The data plane itself is gone, and with it what it held."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds on what producers may put."""

    max_keys: int = 100_000
    max_bytes: int = 64 * 1024**3
    """All columns together."""

    max_bytes_per_key: int = 8 * 1024**3
    max_fields: int = 256
    max_key_chars: int = 256
    max_tags: int = 64
    max_tag_chars: int = 1024
    max_waiters: int = 65_536

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"data plane: {name} is {value}; it must be at least 1")


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """What is known of an entry without its columns."""

    key: str
    state: State
    num_rows: int = 0
    num_bytes: int = 0
    fields: Mapping[str, str] = field(default_factory=dict)
    """Type and shape of each column: `int64[8, 1024]` for a tensor, `numpy.int64[8]` for an array,
    `objects[8]` for plain data."""

    tags: Mapping[str, Scalar] = field(default_factory=dict)
    producer: str = ""


@dataclass(frozen=True, kw_only=True)
class Ready:
    """What a waiter waits for: certain keys, or a number of complete entries of a partition."""

    keys: tuple[str, ...] = ()
    partition: str = ""
    count: int = 0

    def __post_init__(self) -> None:
        if bool(self.keys) == (self.count > 0):
            raise ValueError(f"wait for keys, or for a count of entries; got {self}")


class DataPlane(ABC):
    """One interface over the back-ends; every method may be called from any thread."""

    name: str
    limits: Limits

    @abstractmethod
    def reserve(self, keys: Sequence[str], producer: str = "") -> None:
        """Announce rows that will be put. `producer` is who is named if they never are."""

    @abstractmethod
    def put(
        self,
        key: str,
        columns: Mapping[str, Column],
        tags: Mapping[str, Scalar] | None = None,
        producer: str = "",
    ) -> Receipt:
        """Complete an entry. A key is put once: the second time is `KeyTaken`, also after reads."""

    @abstractmethod
    def get(self, keys: Sequence[str], fields: Sequence[str] | None = None) -> list[Columns]:
        """The columns of each key; `fields` in their order, or all of them.

        They are shared, not copied, where the back-end can: do not write to them.
        """

    @abstractmethod
    def wait(self, ready: Ready, timeout_seconds: float) -> list[Receipt]:
        """The receipts of what was waited for, in the order of `keys` or of completion."""

    @abstractmethod
    async def wait_async(self, ready: Ready, timeout_seconds: float) -> list[Receipt]:
        """`wait` for coroutines; holds no thread."""

    @abstractmethod
    def take(
        self, consumer: str, count: int, partition: str, timeout_seconds: float
    ) -> list[Receipt]:
        """`count` complete entries that no consumer of this name was given, oldest first.

        Whichever come first: who needs certain rows waits for their keys.
        """

    @abstractmethod
    async def take_async(
        self, consumer: str, count: int, partition: str, timeout_seconds: float
    ) -> list[Receipt]:
        """`take` for coroutines; holds no thread."""

    @abstractmethod
    def lose(self, producer: str) -> list[str]:
        """Mark what the producer has not completed as lost, and wake who waits for it."""

    @abstractmethod
    def delete(self, keys: Sequence[str]) -> None:
        """Forget entries, whoever waits for them included. Absent keys are no error."""

    @abstractmethod
    def entries(self, partition: str = "") -> dict[str, Receipt]:
        """The receipts of a partition, in the order in which its entries were announced."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back; waiters get `PlaneLost`."""

    @abstractmethod
    def address(self) -> Any:
        """Plain data from which `connect` reaches this plane, here or in another process."""


def partition_of(key: str) -> str:
    return key.rpartition("/")[0]


# ---- checks of what comes from outside -----------------------------------------------------------


def receipt_for(
    key: str,
    columns: Mapping[str, Column],
    tags: Mapping[str, Scalar] | None,
    producer: str,
    limits: Limits,
) -> Receipt:
    """Check an entry against the limits and describe it."""
    require_key(key, limits)
    if not 0 < len(columns) <= limits.max_fields:
        raise PlaneFull(
            f"key {key!r} has {len(columns)} columns; from 1 to {limits.max_fields} are allowed"
        )
    lengths, fields, num_bytes = set(), {}, 0
    for name, column in columns.items():
        size, fields[name] = described(f"key {key!r}, column {name!r}", column)
        num_bytes += size
        lengths.add(len(column))
    if len(lengths) > 1:
        shown = {name: len(column) for name, column in columns.items()}
        raise ValueError(f"key {key!r}: columns must have equally many rows, got {shown}")
    if num_bytes > limits.max_bytes_per_key:
        raise PlaneFull(
            f"key {key!r} has {num_bytes:,} bytes; at most {limits.max_bytes_per_key:,} are "
            "allowed for one key: split it into several"
        )
    return Receipt(
        key=key,
        state="complete",
        num_rows=lengths.pop(),
        num_bytes=num_bytes,
        fields=fields,
        tags=checked_tags(key, tags or {}, limits),
        producer=producer,
    )


def require_key(key: str, limits: Limits) -> None:
    if not isinstance(key, str) or not 0 < len(key) <= limits.max_key_chars:
        raise ValueError(
            f"a key is text of 1 to {limits.max_key_chars} characters, got {key!r:.80}"
        )


def checked_tags(key: str, tags: Mapping[str, Scalar], limits: Limits) -> dict[str, Scalar]:
    if len(tags) > limits.max_tags:
        raise PlaneFull(f"key {key!r} has {len(tags)} tags; at most {limits.max_tags} are allowed")
    for name, value in tags.items():
        is_scalar = isinstance(value, str | int | float | bool | None)
        if not is_scalar or len(name) + len(str(value)) > limits.max_tag_chars:
            raise ValueError(
                f"key {key!r}: tag {name!r} is {value!r:.80}; tags are numbers and texts of "
                f"at most {limits.max_tag_chars} characters, data belongs into columns"
            )
    return dict(tags)


def described(what: str, column: Any) -> tuple[int, str]:
    """Number of bytes, and type and shape; a ValueError for anything but plain data."""
    if isinstance(column, Tensor):
        if column.layout is not torch.strided or column.is_quantized or not column.dim():
            raise ValueError(f"{what}: a tensor must be dense and have rows, got {column.layout}")
        kind = str(column.dtype).removeprefix("torch.")
        return column.numel() * column.element_size(), f"{kind}{list(column.shape)}"
    if isinstance(column, np.ndarray) and column.ndim and column.dtype.kind in "biufcSUmM":
        return column.nbytes, f"numpy.{column.dtype.name}{list(column.shape)}"
    is_objects = isinstance(column, np.ndarray) and column.ndim and column.dtype == object
    if is_objects or isinstance(column, list):
        entries = column.ravel().tolist() if isinstance(column, np.ndarray) else column
        return size_of_plain(what, entries, 0), f"objects[{len(column)}]"
    raise ValueError(f"{what}: {type(column).__name__} is no column; use a tensor, array or list")


def size_of_plain(what: str, value: Any, depth: int) -> int:
    """About how many bytes plain data takes; a ValueError if it is not plain."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"{what}: nested more than {_MAX_DEPTH} levels deep")
    if type(value) in (list, tuple):
        return 8 + sum(size_of_plain(what, entry, depth + 1) for entry in value)
    if type(value) is dict:
        return sum(size_of_plain(what, part, depth + 1) for pair in value.items() for part in pair)
    if isinstance(value, Tensor | np.ndarray):
        return described(what, value)[0] if value.ndim else 8
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, _PLAIN):
        return 8
    kind = type(value)
    raise ValueError(
        f"{what}: {kind.__module__}.{kind.__qualname__} is not plain data; convert it to tensors, "
        "arrays, numbers, text, lists or dictionaries"
    )


def chosen(key: str, columns: Mapping[str, Any], fields: Sequence[str] | None) -> dict[str, Any]:
    if fields is None:
        return dict(columns)
    missing = [name for name in fields if name not in columns]
    if missing:
        raise RowsMissing(f"key {key!r} has no field {missing[0]!r}; it has {sorted(columns)}")
    return {name: columns[name] for name in fields}

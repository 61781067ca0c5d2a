"""The data plane of a Ray cluster: columns are objects of the store, an actor keeps the book.

    producer                     metadata actor                       consumer
      columns -> object store      ledger, references (no columns)      wait: an awaitable call that
      put(receipt, references) ->  completes the entry  ------------->  returns when it holds
                                                          <- get ----   references of the fields;
                                                                        the columns come from the
                                                                        store, node to node

Objects belong to the process that put them, and end with it, when their node notices: `get` of rows
whose producer has died is then `RowsLost`, with the producer's name. A producer that is an actor is
watched while it has open entries: a call waits in its queue, which fails when it dies, and the
entries become lost.

What goes into the store is a dictionary of (kind, type, shape, bytes), bytes being one buffer:
`unpacked` accepts nothing else. Ray's own envelope around it is Ray's, between the processes of one
cluster. A large column is an object of its own, so that who needs one field fetches one field.
"""

import asyncio
import re
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from torch import Tensor

from verl.data_plane.ledger import Ledger
from verl.data_plane.plane import (
    Column,
    Columns,
    DataPlane,
    KeyTaken,
    Limits,
    PlaneLost,
    PlaneTimeout,
    Ready,
    Receipt,
    RowsLost,
    RowsMissing,
    Scalar,
    receipt_for,
)
from verl.protocol import codec
from verl.protocol.serialization import deserialize_single_tensor, serialize_single_tensor
from verl.utils.timeouts import within

CALL_SECONDS = 60.0
"""How long the metadata actor may take to answer what it can answer at once."""

LARGE_BYTES = 256 * 1024
HEARTBEAT_SECONDS = 1.0
PREFIX = "verl_data_plane_"

Place = Any
"""Where columns are: for the object store, for each field the number of its object."""


class Book:
    """The metadata actor. One thread, many calls that wait."""

    def __init__(self, name: str, limits: dict[str, int]) -> None:
        self.ledger = Ledger(name, Limits(**limits))
        self._places: dict[str, tuple[dict[str, int], list[Any]]] = {}
        self._guards: dict[str, asyncio.Task[None]] = {}
        self._claims: dict[str, str] = {}

    async def describe(self) -> dict[str, Any]:
        return {
            "limits": asdict(self.ledger.limits),
            "num_wakes": self.ledger.num_wakes,
            "num_waiting": self.ledger.num_waiting,
        }

    async def reserve(self, keys: Sequence[str], producer: str, handle: ActorHandle | None) -> None:
        self.ledger.reserve(keys, producer)
        if handle is not None and producer not in self._guards:
            self._guards[producer] = asyncio.create_task(self._guard(producer, handle))

    async def _guard(self, producer: str, handle: ActorHandle) -> None:
        try:
            while self.ledger.has_open(producer):
                await handle.__ray_call__.remote(is_alive)
                await asyncio.sleep(HEARTBEAT_SECONDS)
        except RayActorError:
            self.ledger.lose(producer)
        finally:
            del self._guards[producer]

    async def claim(self, receipt: Receipt) -> None:
        """Somebody stores the columns of a key elsewhere; nobody else may until it has ended."""
        self.ledger.check(receipt)
        if receipt.key in self._claims:
            raise KeyTaken(
                f"data plane {self.ledger.name!r}: {receipt.key!r} is being put by "
                f"{self._claims[receipt.key]}; a key is put once"
            )
        self._claims[receipt.key] = receipt.producer

    async def give_up(self, key: str) -> None:
        self._claims.pop(key, None)

    async def complete(
        self, receipt: Receipt, object_of: dict[str, int], references: list[Any]
    ) -> None:
        self.ledger.check(receipt)
        self._places[receipt.key] = object_of, references
        self._claims.pop(receipt.key, None)  # where columns are stored before the book is told
        self.ledger.complete(receipt)

    async def places(
        self, keys: Sequence[str], fields: Sequence[str] | None
    ) -> list[tuple[Receipt, dict[str, int], dict[int, Any]]]:
        """For each key the objects that hold the fields."""
        self.ledger.require_complete(keys)
        found = []
        for key in keys:
            object_of, references = self._places[key]
            receipt = self.ledger.entry(key)
            names = receipt.fields if fields is None else fields
            missing = [name for name in names if name not in receipt.fields]
            if missing:
                raise RowsMissing(
                    f"key {key!r} has no field {missing[0]!r}; it has {sorted(receipt.fields)}"
                )
            wanted = {name: object_of[name] for name in names} if object_of else {}
            numbers = sorted(set(wanted.values()))
            found.append((receipt, wanted, {number: references[number] for number in numbers}))
        return found

    async def watch(self, ready: Ready, timeout_seconds: float) -> list[Receipt]:
        return await self._awaited(self.ledger.watch(ready), ready, timeout_seconds)

    async def take(
        self, consumer: str, count: int, partition: str, timeout_seconds: float
    ) -> list[Receipt]:
        future = self.ledger.take(consumer, count, partition)
        return await self._awaited(future, Ready(partition=partition, count=count), timeout_seconds)

    async def _awaited(self, future: Any, ready: Ready, timeout_seconds: float) -> list[Receipt]:
        done, _ = await asyncio.wait({asyncio.wrap_future(future)}, timeout=timeout_seconds)
        if done or future.done():
            return future.result(0)
        self.ledger.forget(future)
        raise PlaneTimeout(
            f"data plane {self.ledger.name!r}: after {timeout_seconds:g} s still without "
            f"{self.ledger.shortfall(ready)}"
        )

    async def lose(self, producer: str) -> list[str]:
        return self.ledger.lose(producer)

    async def delete(self, keys: Sequence[str]) -> list[str]:
        found = self.ledger.delete(keys)
        for key in found:
            self._places.pop(key, None)  # an open entry has none
        return found

    async def entries(self, partition: str) -> dict[str, Receipt]:
        return self.ledger.entries(partition)

    async def end(self) -> None:
        self.ledger.end("was closed")


def is_alive(worker: Any) -> bool:
    return True


class RayPlane(DataPlane):
    """A client of the metadata actor; any process of the cluster can have one."""

    backend = "ray"

    def __init__(self, name: str, book: ActorHandle, limits: Limits) -> None:
        self.name = name
        self.limits = limits
        self._book = book

    @classmethod
    def create(cls, name: str, limits: Limits | None, options: Mapping[str, Any]) -> "RayPlane":
        limits = limits or Limits()
        actor = ray.remote(Book).options(
            name=f"{PREFIX}{name}",
            num_cpus=0,
            max_concurrency=limits.max_waiters + 1000,
            max_restarts=0,
        )
        book: Any = actor.remote(name, asdict(limits))
        plane = cls(name, book, limits)
        plane._call("describe")
        plane._open(options)
        return plane

    @classmethod
    def connect(cls, address: Mapping[str, Any]) -> "RayPlane":
        name = address["name"]
        try:
            book = ray.get_actor(f"{PREFIX}{name}", namespace=address["namespace"])
        except ValueError as error:
            raise PlaneLost(
                f"data plane {name!r} is not on this cluster: its metadata actor has ended"
            ) from error
        plane = cls(name, book, Limits(**address["limits"]))
        plane._join()
        return plane

    def _open(self, options: Mapping[str, Any]) -> None:
        """Make ready where columns are stored; the object store always is."""
        if options:
            raise ValueError(f"the object store of Ray has no options, got {sorted(options)}")

    def _join(self) -> None:
        """Reach what `_open` made, from another process."""

    def address(self) -> Any:
        namespace = ray.get_runtime_context().namespace
        limits = asdict(self.limits)
        return {
            "backend": self.backend, "name": self.name, "namespace": namespace, "limits": limits,
        }  # fmt: skip

    @property
    def num_wakes(self) -> int:
        return self._call("describe")["num_wakes"]

    @property
    def num_waiting(self) -> int:
        return self._call("describe")["num_waiting"]

    # ---- verbs -----------------------------------------------------------------------------------

    def reserve(self, keys: Sequence[str], producer: str = "") -> None:
        context = ray.get_runtime_context()
        handle = context.current_actor if context.get_actor_id() is not None else None
        self._call("reserve", list(keys), producer or default_producer(), handle)

    def put(
        self,
        key: str,
        columns: Mapping[str, Column],
        tags: Mapping[str, Scalar] | None = None,
        producer: str = "",
    ) -> Receipt:
        name = producer or default_producer()
        receipt = receipt_for(key, columns, tags, name, self.limits)
        object_of, references = self._stored(receipt, columns)
        self._call("complete", receipt, object_of, references)
        return receipt

    def get(self, keys: Sequence[str], fields: Sequence[str] | None = None) -> list[Columns]:
        places = self._call("places", list(keys), None if fields is None else list(fields))
        return [
            self._fetched(receipt, object_of, references, fields)
            for receipt, object_of, references in places
        ]

    def wait(self, ready: Ready, timeout_seconds: float) -> list[Receipt]:
        return self._call("watch", ready, timeout_seconds, extra_seconds=timeout_seconds)

    async def wait_async(self, ready: Ready, timeout_seconds: float) -> list[Receipt]:
        return await self._call_async("watch", timeout_seconds, ready, timeout_seconds)

    def take(
        self, consumer: str, count: int, partition: str, timeout_seconds: float
    ) -> list[Receipt]:
        return self._call(
            "take", consumer, count, partition, timeout_seconds, extra_seconds=timeout_seconds
        )

    async def take_async(
        self, consumer: str, count: int, partition: str, timeout_seconds: float
    ) -> list[Receipt]:
        return await self._call_async(
            "take", timeout_seconds, consumer, count, partition, timeout_seconds
        )

    def lose(self, producer: str) -> list[str]:
        return self._call("lose", producer)

    def delete(self, keys: Sequence[str]) -> None:
        self._discard(self._call("delete", list(keys)))

    def entries(self, partition: str = "") -> dict[str, Receipt]:
        return self._call("entries", partition)

    def close(self) -> None:
        self._call("end")
        ray.kill(self._book)

    # ---- where columns are: the object store -----------------------------------------------------

    def _stored(
        self, receipt: Receipt, columns: Mapping[str, Column]
    ) -> tuple[dict[str, int], list[Any]]:
        """The number of the object that each field is in, and references to the objects."""
        packed = {name: packed_column(name, column) for name, column in columns.items()}
        large = [name for name, column in packed.items() if column[3].nbytes >= LARGE_BYTES]
        small = [name for name in packed if name not in large]
        parts = [[name] for name in large] + ([small] if small else [])
        references = [ray.put({name: packed[name] for name in part}) for part in parts]
        return {name: number for number, part in enumerate(parts) for name in part}, references

    def _fetched(
        self,
        receipt: Receipt,
        object_of: dict[str, int],
        references: dict[int, Any],
        fields: Sequence[str] | None,
    ) -> Columns:
        try:
            values = ray.get(list(references.values()), timeout=CALL_SECONDS)
        except RayError as error:
            raise RowsLost(
                f"data plane {self.name!r}: the columns of {receipt.key!r}, put by "
                f"{receipt.producer}, cannot be fetched: {first_line(error)}"
            ) from error
        objects = dict(zip(references, values, strict=True))
        return {name: unpacked(name, objects[number][name]) for name, number in object_of.items()}

    def _discard(self, keys: Sequence[str]) -> None:
        """The store drops objects that nobody refers to."""

    # ---- calls of the actor ----------------------------------------------------------------------

    def _call(self, method: str, *args: Any, extra_seconds: float = 0.0) -> Any:
        try:
            reference = getattr(self._book, method).remote(*args)
            return ray.get(reference, timeout=CALL_SECONDS + extra_seconds)
        except RayError as error:
            raise self._translated(error, method) from error

    async def _call_async(self, method: str, extra_seconds: float, *args: Any) -> Any:
        reference: Awaitable[Any] = getattr(self._book, method).remote(*args)
        try:
            return await within(reference, CALL_SECONDS + extra_seconds)
        except TimeoutError as error:
            raise self._translated(GetTimeoutError(str(error)), method) from error
        except RayError as error:
            raise self._translated(error, method) from error

    def _translated(self, error: RayError, method: str) -> Exception:
        if isinstance(error, RayTaskError):
            return error.cause
        if isinstance(error, GetTimeoutError):
            return PlaneTimeout(
                f"data plane {self.name!r}: its metadata actor did not answer {method!r} within "
                f"{CALL_SECONDS:g} s; it is stopped, or its node is overloaded"
            )
        return PlaneLost(
            f"data plane {self.name!r} is gone: its metadata actor died ({first_line(error)}). "
            "Rows that were not trained on are lost with it; start the run again, it resumes from "
            "its last checkpoint"
        )


def default_producer() -> str:
    context = ray.get_runtime_context()
    actor = context.get_actor_id()
    return f"worker {context.get_worker_id()[:12]}" if actor is None else f"actor {actor[:12]}"


def first_line(error: BaseException) -> str:
    text = re.sub(r"\x1b\[[0-9]*m", "", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}"


def packed_column(name: str, column: Column) -> tuple[str, str, tuple[int, ...], np.ndarray]:
    if isinstance(column, Tensor):
        return ("tensor", *serialize_single_tensor(column))
    if isinstance(column, np.ndarray) and column.dtype != object:
        octets = np.ascontiguousarray(column).reshape(-1).view(np.uint8)
        return "array", column.dtype.str, column.shape, octets
    octets = np.frombuffer(codec.dumps(column, f"column {name!r}"), dtype=np.uint8)
    return "plain", "", (len(column),), octets


def unpacked(name: str, packed: Any) -> Column:
    kind, dtype, shape, octets = packed
    if not isinstance(octets, np.ndarray) or octets.dtype != np.uint8:
        raise ValueError(f"column {name!r} is no packed column but {type(octets).__name__}")
    if kind == "tensor":
        return deserialize_single_tensor((dtype, shape, octets))
    if kind == "array":
        return octets.view(np.dtype(dtype)).reshape(shape)
    if kind == "plain":
        return codec.loads(octets.data)
    raise ValueError(f"column {name!r} is of kind {kind!r}; known: tensor, array, plain")

"""The data plane of one process: columns are passed as they are, nothing is copied.

producer thread                        waiting thread or coroutine
  put: under the lock, store columns,    sleeps on a future of its own
  complete the entry in the ledger  ---->  wakes when its condition holds, once
"""

import asyncio
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from verl.data_plane.ledger import Ledger
from verl.data_plane.plane import (
    Column,
    Columns,
    DataPlane,
    Limits,
    PlaneLost,
    PlaneTimeout,
    Ready,
    Receipt,
    Scalar,
    chosen,
    receipt_for,
)

Receipts = Future  # of list[Receipt]


class InProcessPlane(DataPlane):
    _planes: "weakref.WeakValueDictionary[str, InProcessPlane]" = weakref.WeakValueDictionary()

    def __init__(self, name: str, limits: Limits | None = None) -> None:
        self.name = name
        self.limits = limits or Limits()
        self._ledger = Ledger(name, self.limits)
        self._columns: dict[str, Columns] = {}
        self._lock = threading.Lock()
        if InProcessPlane._planes.setdefault(name, self) is not self:
            raise ValueError(f"there is a data plane {name!r} in this process already")

    @classmethod
    def create(
        cls, name: str, limits: Limits | None, options: Mapping[str, Any]
    ) -> "InProcessPlane":
        if options:
            raise ValueError(f"a plane in process has no options, got {sorted(options)}")
        return cls(name, limits)

    @classmethod
    def connect(cls, address: Mapping[str, Any]) -> "InProcessPlane":
        name = address["name"]
        plane = cls._planes.get(name)
        if plane is None:
            raise PlaneLost(
                f"data plane {name!r} is not in this process; rows in process reach the ranks of "
                "this process only, on Ray use the plane of Ray"
            )
        return plane

    @property
    def num_wakes(self) -> int:
        """Waiters that were woken up; one for each wait that had to sleep."""
        return self._ledger.num_wakes

    @property
    def num_waiting(self) -> int:
        return self._ledger.num_waiting

    def reserve(self, keys: Sequence[str], producer: str = "") -> None:
        with self._lock:
            self._ledger.reserve(keys, producer)

    def put(
        self,
        key: str,
        columns: Mapping[str, Column],
        tags: Mapping[str, Scalar] | None = None,
        producer: str = "",
    ) -> Receipt:
        receipt = receipt_for(key, columns, tags, producer, self.limits)
        with self._lock:
            self._ledger.check(receipt)
            self._columns[key] = dict(columns)
            self._ledger.complete(receipt)
        return receipt

    def get(self, keys: Sequence[str], fields: Sequence[str] | None = None) -> list[Columns]:
        with self._lock:
            self._ledger.require_complete(keys)
            return [chosen(key, self._columns[key], fields) for key in keys]

    def wait(self, ready: Ready, timeout_seconds: float) -> list[Receipt]:
        return self._result(lambda: self._ledger.watch(ready), ready, timeout_seconds)

    async def wait_async(self, ready: Ready, timeout_seconds: float) -> list[Receipt]:
        return await self._awaited(lambda: self._ledger.watch(ready), ready, timeout_seconds)

    def take(
        self, consumer: str, count: int, partition: str, timeout_seconds: float
    ) -> list[Receipt]:
        ready = Ready(partition=partition, count=count)
        start = lambda: self._ledger.take(consumer, count, partition)  # noqa: E731
        return self._result(start, ready, timeout_seconds)

    async def take_async(
        self, consumer: str, count: int, partition: str, timeout_seconds: float
    ) -> list[Receipt]:
        ready = Ready(partition=partition, count=count)
        start = lambda: self._ledger.take(consumer, count, partition)  # noqa: E731
        return await self._awaited(start, ready, timeout_seconds)

    def lose(self, producer: str) -> list[str]:
        with self._lock:
            return self._ledger.lose(producer)

    def delete(self, keys: Sequence[str]) -> None:
        with self._lock:
            for key in self._ledger.delete(keys):
                self._columns.pop(key, None)  # an open entry has none

    def entries(self, partition: str = "") -> dict[str, Receipt]:
        with self._lock:
            return self._ledger.entries(partition)

    def close(self) -> None:
        with self._lock:
            self._ledger.end("was closed")
            self._columns.clear()
        InProcessPlane._planes.pop(self.name, None)

    def address(self) -> Any:
        return {"backend": "in_process", "name": self.name}

    def _result(
        self, start: "Callable[[], Receipts]", ready: Ready, timeout_seconds: float
    ) -> list[Receipt]:
        with self._lock:
            future = start()
        try:
            return future.result(timeout_seconds)
        except FutureTimeout:
            return self._late(future, ready, timeout_seconds)

    async def _awaited(
        self, start: "Callable[[], Receipts]", ready: Ready, timeout_seconds: float
    ) -> list[Receipt]:
        with self._lock:
            future = start()
        waiting = asyncio.wrap_future(future)
        try:
            done, _ = await asyncio.wait({waiting}, timeout=timeout_seconds)
        except asyncio.CancelledError:
            with self._lock:
                self._ledger.forget(future)
            raise
        return future.result(0) if done else self._late(future, ready, timeout_seconds)

    def _late(self, future: "Receipts", ready: Ready, timeout_seconds: float) -> list[Receipt]:
        """Give up, unless what was waited for came at the last moment."""
        with self._lock:
            if future.done() and not future.cancelled():
                return future.result(0)
            self._ledger.forget(future)
            raise PlaneTimeout(
                f"data plane {self.name!r}: after {timeout_seconds:g} s still without "
                f"{self._ledger.shortfall(ready)}"
            )

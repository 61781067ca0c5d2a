"""A batch that workers are still computing.

The driver may hand it on, whole or in chunks, but not look inside: the parts are fetched by whoever
needs them, usually another worker. A part is whatever the controller's back-end returns for a call:
an object with `result(timeout)`, like `concurrent.futures.Future`, or a Ray object reference.
"""

import concurrent.futures
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeAlias, runtime_checkable

from tensordict import TensorDictBase

from verl.protocol.data_proto import DataProto
from verl.utils.tensor_rows import BatchError
from verl.utils.tensordict_utils import chunk_tensordict, concat_tensordict

DEFAULT_TIMEOUT_SECONDS = 3600.0
"""How long `get` waits for all parts together, unless told otherwise."""

_CLOCK_SLACK_SECONDS = 0.05
"""Back-ends round their timeouts, and may give up a little early."""

Batch: TypeAlias = DataProto | TensorDictBase


@runtime_checkable
class Waitable(Protocol):
    """A running call of a back-end other than Ray."""

    def result(self, timeout: float | None = None) -> Any: ...


@dataclass(eq=False)
class DataProtoFuture:
    collect_fn: Callable[[list[Any]], Batch]
    """Joins the fetched parts."""

    futures: list[Any]
    """One per part, in the order of the parts."""

    dispatch_fn: Callable[[Any], Any] | None = None
    """Takes a share of the joined batch."""

    @staticmethod
    def concat(data: Sequence[Any]) -> "DataProtoFuture":
        """The batch whose parts are these futures."""
        return DataProtoFuture(collect_fn=concat_parts, futures=list(data))

    def chunk(self, chunks: int) -> list["DataProtoFuture"]:
        """The same parts, of which each receiver takes its own chunk when it fetches them."""
        return [
            DataProtoFuture(
                collect_fn=self.collect_fn,
                futures=self.futures,
                dispatch_fn=partial(_take_chunk, number=i, chunks=chunks, first=self.dispatch_fn),
            )
            for i in range(chunks)
        ]

    def get(self, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS) -> Any:
        """Wait for the parts, join them and take the share; a TimeoutError names the late part."""
        batch = self.collect_fn(_fetch(self.futures, timeout_seconds))
        return batch if self.dispatch_fn is None else self.dispatch_fn(batch)


def concat_parts(parts: list[Any]) -> Batch:
    """Join parts that are all DataProtos or all TensorDicts."""
    if parts and all(isinstance(part, DataProto) for part in parts):
        return DataProto.concat(parts)
    if parts and all(isinstance(part, TensorDictBase) for part in parts):
        return concat_tensordict(parts)
    kinds = [type(part).__name__ for part in parts]
    raise BatchError(f"parts of a batch must all be DataProto or all TensorDict, got {kinds}")


def _take_chunk(
    batch: Any, *, number: int, chunks: int, first: Callable[[Any], Any] | None
) -> Batch:
    batch = batch if first is None else first(batch)
    if isinstance(batch, TensorDictBase):
        return chunk_tensordict(batch, chunks)[number]
    return batch.chunk(chunks)[number]


def _fetch(futures: Sequence[Any], timeout_seconds: float) -> list[Any]:
    deadline = time.monotonic() + timeout_seconds
    parts = []
    for number, future in enumerate(futures):
        remaining = max(0.0, deadline - time.monotonic())
        try:
            parts.append(_result(future, remaining))
        # Before Python 3.11 the first is not the built-in TimeoutError.
        except (concurrent.futures.TimeoutError, TimeoutError) as error:
            if time.monotonic() < deadline - _CLOCK_SLACK_SECONDS:
                raise  # the call itself failed that way
            raise TimeoutError(
                f"part {number} of {len(futures)} of a batch did not arrive within "
                f"{timeout_seconds:g} s: {future}"
            ) from error
    return parts


def _result(future: Any, timeout_seconds: float) -> Any:
    if isinstance(future, Waitable):
        return future.result(timeout=timeout_seconds)
    import ray  # noqa: PLC0415 - only a Ray controller hands out Ray references

    return ray.get(future, timeout=timeout_seconds)

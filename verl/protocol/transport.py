"""Batches between ranks: futures, gathering, padding to a number of ranks, collation.

A `DataProtoFuture` is a batch that workers still compute. The driver may hand it on, whole or in
chunks, but not look inside: the parts are fetched by the worker that needs them. A part is whatever
the controller's back-end returns for a call: an object with `result(timeout)`, or a Ray reference.

Gathered batches travel as bytes in the format of `save_to_disk`, so their columns must hold plain
data, and the sizes go first. A rank that cannot send reports that in place of its size: all ranks
then raise, and none waits for it. The deadline of both collectives is that of the process group.
"""

import concurrent.futures
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from verl.protocol.data_proto import DataProto
from verl.protocol.ops import DataProtoItem, list_of_dict_to_dict_of_list, object_array
from verl.protocol.storage import Fields, dump_fields, parse_fields
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


_CANNOT_SEND = -1


def all_gather_data_proto(data: DataProto, process_group: dist.ProcessGroup) -> None:
    """Replace the rows of `data` by those of all ranks, in rank order; `meta_info` stays."""
    device = _communication_device(process_group)
    octets, refusal = _dump_rows(data)
    size = len(octets) if refusal is None else _CANNOT_SEND
    sizes = [
        int(s) for s in torch.cat(_all_gather(torch.tensor([size], device=device), process_group))
    ]
    if refusal is not None:
        try:
            raise refusal
        finally:
            del refusal  # an error that its own frame names would keep the process group alive
    if _CANNOT_SEND in sizes:
        ranks = [rank for rank, size in enumerate(sizes) if size == _CANNOT_SEND]
        raise ValueError(f"ranks {ranks} could not send their rows; the reason is in their logs")
    message = torch.zeros(max(sizes), dtype=torch.uint8)
    message[: len(octets)] = torch.tensor(np.frombuffer(octets, dtype=np.uint8))
    messages = _all_gather(message.to(device), process_group)
    parts = [
        DataProto(*parse_fields(received[:size].cpu().numpy().tobytes()))  # pyright: ignore[reportArgumentType]
        for received, size in zip(messages, sizes, strict=True)
    ]
    _replace_rows(data, DataProto.concat(parts))


def _communication_device(group: dist.ProcessGroup) -> torch.device:
    accelerator = torch.accelerator.current_accelerator()
    if "gloo" in dist.get_backend(group) or accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _dump_rows(data: DataProto) -> tuple[bytes, ValueError | None]:
    try:
        return dump_fields(Fields(data.batch, data.non_tensor_batch, {})), None
    except ValueError as error:
        return b"", error


def _all_gather(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, tensor, group=group)
    return gathered


def _replace_rows(data: DataProto, whole: DataProto) -> None:
    if data.batch is not None:
        for column in data.batch.values():
            whole.to(column.device)  # the columns of a batch are on one device
            break
    data.batch, data.non_tensor_batch = whole.batch, whole.non_tensor_batch


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Repeat rows from the start until `size_divisor` divides their number; returns how many.

    A batch that divides already, and an empty one, are returned as they are.
    """
    if size_divisor < 1:
        raise BatchError(f"size_divisor must be at least 1, got {size_divisor}")
    pad_size = -len(data) % size_divisor
    if pad_size == 0:
        return data, 0
    return data.select_idxs(np.arange(len(data) + pad_size) % len(data)), pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Drop the last `pad_size` rows."""
    if not 0 <= pad_size <= len(data):
        raise BatchError(f"cannot drop {pad_size} of {len(data)} rows")
    return data if pad_size == 0 else data.slice(0, len(data) - pad_size)


def collate_fn(x: Sequence[DataProtoItem]) -> DataProto:
    """Stack rows; `meta_info` is left empty, for it belongs to the batch the rows come from."""
    if not x:
        raise BatchError("cannot make a batch of no rows")
    arrays = list_of_dict_to_dict_of_list([item.non_tensor_batch for item in x])
    batch: Any = None
    if x[0].batch is not None:
        columns = list_of_dict_to_dict_of_list([dict(item.batch.items()) for item in x])
        stacked = {key: _stack(key, values) for key, values in columns.items()}
        batch = TensorDict(stacked, batch_size=[len(x)])
    return DataProto(batch, {key: _as_array(values) for key, values in arrays.items()})


def _stack(key: str, rows: list[Tensor]) -> Tensor:
    shapes = {tuple(row.shape) for row in rows}
    if len(shapes) > 1:
        raise BatchError(
            f"the rows of {key!r} have different shapes, {sorted(shapes)}; choose rows of a jagged "
            f"column with data.select_idxs instead of one by one"
        )
    return torch.stack(rows)


def _as_array(values: list[Any]) -> np.ndarray:
    """NumPy scalars become an array of their own type again, anything else an array of objects."""
    if all(isinstance(value, np.generic) for value in values):
        return np.array(values)
    return object_array(values)

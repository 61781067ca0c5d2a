"""Tensors as NumPy buffers, so that a batch can travel between processes.

A pickled DataProto holds every tensor as (dtype, shape, bytes), the bytes being a uint8 array over
the tensor's own memory. Nothing is copied to get there unless the tensor is strided or on a device,
and a transport that supports out-of-band buffers (Ray, pickle protocol 5) does not copy either.
This is the one method; `VERL_DATAPROTO_SERIALIZATION_METHOD` may be set to any value.

A tensor arrives on the device it came from if that exists here, and on the CPU otherwise. Autograd
does not travel: what arrives is data. Files are another matter, see `verl.protocol.storage`.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torch import Tensor

from verl.utils.tensor_rows import BatchError, compact, jagged, open_jagged
from verl.utils.tensordict_utils import non_tensor_stack

SerializedTensor: TypeAlias = tuple[str, tuple[int, ...], Any]
"""dtype, shape, buffer."""

SerializedTensorDict: TypeAlias = tuple[tuple[int, ...], str | None, dict[str, tuple[Any, ...]]]
"""Batch size, device and items. An item is one of
    (dtype, shape, buffer[, device])                dense tensor
    ("jagged", [values, offsets], dim[, device])    jagged tensor
    ("nested", [row, row, ...], dtype[, device])    nested tensor of the strided layout
    ("tensordict", (batch size, device, items))     nested table
    ("objects", [...]) or ("object", value)         NonTensorStack, NonTensorData
"""


def serialize_single_tensor(obj: Tensor) -> SerializedTensor:
    """A dense tensor as its dtype, its shape and its bytes (a uint8 array)."""
    if obj.is_nested or obj.layout is not torch.strided or obj.is_quantized:
        raise BatchError(f"only dense tensors have bytes of their own, got layout {obj.layout}")
    if obj.device.type == "meta":
        raise BatchError("a tensor on the meta device has no data to serialize")
    return dtype_name(obj.dtype), tuple(obj.shape), octets_of(plain_data(obj)).numpy()


def plain_data(tensor: Tensor) -> Tensor:
    """The values of a dense tensor, contiguous and on the CPU: itself where it is that already."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def octets_of(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as bytes."""
    # A single element counts as contiguous whatever its stride, and torch would not view that.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def deserialize_single_tensor(arr: Sequence[Any]) -> Tensor:
    """The tensor on the CPU; it owns its memory or shares a buffer that may be written to."""
    dtype, shape, buffer = arr
    octets = np.frombuffer(buffer, dtype=np.uint8)
    # Torch would let us write through a read-only buffer (Ray maps its store that way), and crash.
    if not octets.flags.writeable or octets.ctypes.data % 16:
        octets = octets.copy()
    return torch.from_numpy(octets).view(dtype_named(dtype)).view(tuple(shape))


def serialize_tensordict(batch: TensorDictBase) -> SerializedTensorDict:
    shared_offsets: dict[tuple[int, int], SerializedTensor] = {}
    items = {key: _pack(entry, shared_offsets) for key, entry in batch.items()}
    return tuple(batch.batch_size), None if batch.device is None else str(batch.device), items


def deserialize_tensordict(arr: SerializedTensorDict) -> TensorDict:
    batch_size, device, items = arr
    shared_offsets: dict[int, Tensor] = {}
    entries = {key: _unpack(item, shared_offsets) for key, item in items.items()}
    return TensorDict(entries, batch_size=batch_size, device=device and landing_device(device))


def _pack(entry: Any, shared_offsets: dict[tuple[int, int], SerializedTensor]) -> tuple[Any, ...]:
    if isinstance(entry, NonTensorStack):
        return "objects", entry.tolist()
    if isinstance(entry, NonTensorData):
        return "object", entry.data
    if isinstance(entry, TensorDictBase):
        return "tensordict", serialize_tensordict(entry)
    place = () if entry.device.type == "cpu" else (str(entry.device),)
    if not entry.is_nested:
        return *serialize_single_tensor(entry), *place
    if entry.layout is torch.strided:
        rows = [serialize_single_tensor(row) for row in entry.unbind()]
        return "nested", rows, dtype_name(entry.dtype), *place
    # Columns that share their offsets must do so on arrival, too; see `verl.utils.tensor_rows`.
    key = (id(entry.offsets()), id(entry.lengths()))
    parts = open_jagged(compact(entry))
    if key not in shared_offsets:
        shared_offsets[key] = serialize_single_tensor(parts.offsets)
    return "jagged", [serialize_single_tensor(parts.values), shared_offsets[key]], parts.dim, *place


def _unpack(item: tuple[Any, ...], shared_offsets: dict[int, Tensor]) -> Any:
    if item[0] == "objects":
        return non_tensor_stack(item[1])
    if item[0] == "object":
        return NonTensorData(item[1])
    if item[0] == "tensordict":
        return deserialize_tensordict(item[1])
    first, second, third, *place = item
    if first == "nested":
        rows = [_land(deserialize_single_tensor(row), place) for row in second]
        return torch.nested.as_nested_tensor(rows, dtype=dtype_named(third))
    if first != "jagged":
        return _land(deserialize_single_tensor((first, second, third)), place)
    values, offsets = second
    if id(offsets) not in shared_offsets:
        shared_offsets[id(offsets)] = _land(deserialize_single_tensor(offsets), place)
    return jagged(
        _land(deserialize_single_tensor(values), place), shared_offsets[id(offsets)], third
    )


def _land(tensor: Tensor, place: list[str]) -> Tensor:
    return tensor.to(landing_device(*place)) if place else tensor


def landing_device(name: str) -> torch.device:
    """The device of that name if this process has it, else the CPU."""
    device = torch.device(name)
    here = torch.accelerator.current_accelerator()
    if here is None or here.type != device.type:
        return torch.device("cpu")
    return device if (device.index or 0) < torch.accelerator.device_count() else torch.device("cpu")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    dtype = vars(torch).get(name)
    if not isinstance(dtype, torch.dtype):
        raise BatchError(f"{name!r} is not the name of a torch dtype")
    return dtype

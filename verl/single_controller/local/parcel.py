"""Objects as bytes, for the pipes between the driver and its own worker processes.

`multiprocessing` pickles what is sent over its connections; this does the same with two
differences. An object is packed once however many ranks get it, and forwarded without being
unpacked. And tensors travel by value: the default of torch, shared memory, would let a worker
change the driver's batch and fails when the same bytes are opened twice. The bytes come from our
own processes only.
"""

from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch import Tensor

PROTOCOL = 5  # large arrays are copied once


class Parcel:
    """One packed object."""

    __slots__ = ("content",)

    def __init__(self, content: bytes | memoryview) -> None:
        self.content = content

    @classmethod
    def of(cls, value: Any, what: str) -> "Parcel":
        """Pack `value`; `what` names it in the error when it cannot travel."""
        try:
            return cls(_ByValuePickler.dumps(value, PROTOCOL))
        except Exception as error:
            raise ValueError(
                f"{what} cannot be sent to another process: {error}. Classes and functions must be "
                f"defined at the top level of an importable module, and objects must not hold "
                f"locks, open files or generators"
            ) from error

    def open(self) -> Any:
        return ForkingPickler.loads(self.content)  # pyright: ignore[reportAttributeAccessIssue]

    def __reduce__(self) -> tuple[Any, ...]:
        return Parcel, (bytes(self.content),)


class _ByValuePickler(ForkingPickler):
    _extra_reducers = {}  # its own table: without the shared-memory entries that torch adds


def _reduce_tensor(tensor: Tensor) -> tuple[Any, ...]:
    is_plain = tensor.device.type == "cpu" and tensor.layout is torch.strided
    if not is_plain or tensor.requires_grad or tensor.is_quantized or tensor.is_conj():
        return tensor.__reduce_ex__(PROTOCOL)
    flat = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return _rebuild_tensor, (flat, tensor.dtype, tuple(tensor.shape))


def _rebuild_tensor(flat: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(flat).view(dtype).view(shape)


_ByValuePickler.register(Tensor, _reduce_tensor)

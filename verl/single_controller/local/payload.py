"""What travels over the line between the driver and a worker process.

A message is a frame of `verl.utils.line` with the number of its call, and JSON in it; the frames of
the payloads that it announces follow it, under the same number. The driver sends `Setup` once, then
requests; the worker sends its `ProcessAddress` once, then one reply per request, in their order. An
empty request asks the worker to end.

A payload is a pickled object, as `multiprocessing` would send it, with two differences. It is
packed once however many ranks get it, and forwarded without being unpacked. And tensors travel by
value: the default of torch, shared memory, would let a worker change the driver's batch and fails
when the same bytes are opened twice. Ranks are the trainer: they run its classes and hold its
weights, so what they pickle is trusted as it is. Nothing that runs a reward function or a model's
code may be read this way; see docs/faults.md.
"""

import json
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from verl.utils.line import Octets

PROTOCOL = 5  # large arrays are copied once


MAX_BYTES = 1 << 40
"""Of a frame: a payload may be as large as memory."""

VALUE, FAILURE = 0, 1
"""Kinds of replies."""

CONSTRUCT = "__init__"
"""The method name of the first request, whose only payload is a `ClassWithInitArgs`."""


class Setup(NamedTuple):
    variables: dict[str, str]
    """The whole environment of the rank."""

    driver_pid: int
    parent_pid: int
    """The driver, or its fork server."""

    dies_with_thread: bool
    """Whether the kernel may end the worker when the thread that started it ends."""

    preparation: dict[str, Any] | None
    """What `multiprocessing` makes a forked process like its driver with; None if it was spawned,
    which includes this."""

    def encoded(self) -> bytes:
        return json.dumps(self).encode()

    @classmethod
    def of(cls, body: Octets) -> "Setup":
        return cls(*json.loads(bytes(body)))


class Request(NamedTuple):
    method: str
    num_args: int
    keywords: Sequence[str]
    """Names of the payloads that follow the positional ones."""

    def encoded(self) -> bytes:
        return json.dumps(self).encode()

    @classmethod
    def of(cls, body: Octets) -> "Request":
        return cls(*json.loads(bytes(body)))

    @property
    def num_payloads(self) -> int:
        return self.num_args + len(self.keywords)


class Payload:
    """One packed object."""

    __slots__ = ("content",)

    def __init__(self, content: Octets) -> None:
        self.content = content

    @classmethod
    def of(cls, value: Any, what: str) -> "Payload":
        """Pack `value`; `what` names it in the error when it cannot travel."""
        try:
            return cls(_ByValuePickler.dumps(value, PROTOCOL))
        except Exception as error:
            raise ValueError(
                f"{what} cannot be sent to another process: {error}. Classes and functions must be "
                f"defined at the top level of an importable module, and objects must not hold "
                f"locks, open files or generators"
            ) from error

    def unpickle(self) -> Any:
        return ForkingPickler.loads(self.content)  # pyright: ignore[reportAttributeAccessIssue]

    def __reduce__(self) -> tuple[Any, ...]:
        return Payload, (bytes(self.content),)


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

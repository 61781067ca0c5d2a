"""GPU memory that can be given back and come again at the same address.

Captured graphs remember addresses. Ordinary allocations come back somewhere else; here an address
range is reserved once and physical memory is put behind it only while it is needed. Uses the CUDA
driver's virtual memory calls directly, because torch offers no way to them.
"""

import ctypes
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from verl.utils.device import free_cached_memory

PINNED_ALLOCATION = 1
ON_DEVICE = 1
READ_AND_WRITE = 3
OUT_OF_MEMORY = 2


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _AllocationProperties(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("requested_handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class _Access(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


class CudaDriverError(RuntimeError):
    """A driver call that failed; the message has its name and its error."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class SteadyMemory:
    """`num_bytes` of one GPU's memory at one address; mapped from the start."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        torch.cuda.synchronize(device)  # there is a context from here on
        index = torch.cuda.current_device() if device.index is None else device.index
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._location = _Location(ON_DEVICE, index)
        self._properties = _AllocationProperties(type=PINNED_ALLOCATION, location=self._location)
        granularity = ctypes.c_size_t()
        self._call(
            "cuMemGetAllocationGranularity",
            ctypes.byref(granularity),
            ctypes.byref(self._properties),
            ctypes.c_int(0),
        )
        self.num_bytes = num_bytes + -num_bytes % granularity.value
        self._address = ctypes.c_uint64()
        self._handle = ctypes.c_uint64()
        zero = ctypes.c_uint64(0)
        self._call(
            "cuMemAddressReserve",
            ctypes.byref(self._address),
            ctypes.c_size_t(self.num_bytes),
            ctypes.c_size_t(0),
            zero,
            zero,
        )
        self.is_mapped = False
        self.map()

    @property
    def address(self) -> int:
        return self._address.value

    def map(self) -> None:
        """Put memory behind the address; what it holds is undefined."""
        if self.is_mapped:
            return
        try:
            self._create()
        except CudaDriverError as error:
            if error.status != OUT_OF_MEMORY:
                raise
            free_cached_memory()  # torch keeps what its tensors gave back, unknown to the driver
            self._create()
        size = ctypes.c_size_t(self.num_bytes)
        zero, one = ctypes.c_uint64(0), ctypes.c_size_t(1)
        access = _Access(self._location, READ_AND_WRITE)
        with ExitStack() as undo:
            undo.callback(self._call, "cuMemRelease", self._handle)
            self._call("cuMemMap", self._address, size, ctypes.c_size_t(0), self._handle, zero)
            undo.callback(self._call, "cuMemUnmap", self._address, size)
            self._call("cuMemSetAccess", self._address, size, ctypes.byref(access), one)
            undo.pop_all()
        self.is_mapped = True

    def _create(self) -> None:
        created, properties = ctypes.byref(self._handle), ctypes.byref(self._properties)
        size, zero = ctypes.c_size_t(self.num_bytes), ctypes.c_uint64(0)
        self._call("cuMemCreate", created, size, properties, zero)

    def unmap(self) -> None:
        """Give the memory back once all work that uses it is done; the address stays ours."""
        if not self.is_mapped:
            return
        torch.cuda.synchronize()
        self._call("cuMemUnmap", self._address, ctypes.c_size_t(self.num_bytes))
        self._call("cuMemRelease", self._handle)
        self.is_mapped = False

    def as_bytes(self) -> Tensor:
        """The memory as a tensor of bytes. It must not be touched while unmapped."""
        return torch.as_tensor(_Bytes(self), device=f"cuda:{self._location.id}")

    def close(self) -> None:
        self.unmap()
        if self.address:
            self._call("cuMemAddressFree", self._address, ctypes.c_size_t(self.num_bytes))
            self._address = ctypes.c_uint64()

    def _call(self, name: str, *arguments: Any) -> None:
        status = self._driver[name](*arguments)
        if status:
            text = ctypes.c_char_p()
            self._driver["cuGetErrorString"](ctypes.c_int(status), ctypes.byref(text))
            reason = (text.value or b"unknown error").decode()
            message = f"{name} for {self._size_text()} failed: {reason} ({status})"
            raise CudaDriverError(message, status)

    def _size_text(self) -> str:
        return f"{self.num_bytes >> 20} MiB" if "num_bytes" in vars(self) else "a GPU"


class _Bytes:
    """What torch needs to know to look at memory that it did not allocate."""

    def __init__(self, memory: SteadyMemory) -> None:
        self.memory = memory  # lives as long as a tensor looks at it
        self.__cuda_array_interface__ = {
            "shape": (memory.num_bytes,),
            "typestr": "|u1",
            "data": (memory.address, False),
            "version": 3,
        }

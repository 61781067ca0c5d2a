"""Many tensors to a device in one copy, from pinned memory: the host neither waits nor repeats.

A copy of a Python list or of ordinary memory makes the host wait until the device has done all
that came before. Pinned memory does not; torch keeps it until the copy is done.
"""

from collections.abc import Sequence

import torch
from torch import Size, Tensor

ALIGNMENT = 16
"""Bytes at whose multiples tensors begin."""


class Record:
    """Tensors of known kinds and shapes, one behind the other in a buffer of bytes."""

    def __init__(self, fields: Sequence[tuple[torch.dtype, Size]]) -> None:
        self.fields = fields
        self.num_bytes = 0
        self._starts: list[int] = []
        for dtype, shape in fields:
            self._starts.append(self.num_bytes)
            size = shape.numel() * dtype.itemsize
            self.num_bytes += size + -size % ALIGNMENT

    def views(self, buffer: Tensor) -> list[Tensor]:
        """The tensors themselves; whoever writes to them writes to the buffer."""
        return [
            buffer[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)
            for start, (dtype, shape) in zip(self._starts, self.fields, strict=True)
        ]

    def on_host(self, device: torch.device) -> Tensor:
        """A new buffer whose copy to a GPU does not wait; its contents are undefined."""
        return torch.empty(self.num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


def in_one_copy(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The same tensors, which are in ordinary memory, on `device`."""
    record = Record([(tensor.dtype, tensor.shape) for tensor in tensors])
    buffer = record.on_host(device)
    for view, tensor in zip(record.views(buffer), tensors, strict=True):
        view.copy_(tensor)
    return record.views(buffer.to(device, non_blocking=device.type == "cuda"))

"""Safetensors files, written and read as a stream of bytes.

A file is an 8-byte length, a JSON header that gives each tensor's dtype, shape and offsets, and the
bytes. We write it ourselves so that one tensor at a time is in memory and a full disk is an
`OSError`, and we read it ourselves so that tensors are copies, not windows into a file that may be
deleted. The header is checked in full before a single tensor is read. Knows no torch.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any

from verl.utils.checkpoint.layout import CheckpointCorruptError, naming, write_all

MAX_HEADER_BYTES = 16 << 20
BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TensorSource:
    """A tensor to be written; its bytes are asked for when their turn comes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    read: Callable[[], memoryview]


@dataclass(frozen=True, kw_only=True)
class TensorLocation:
    """Where a tensor lies in a file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


def write_safetensors(
    path: Path,
    tensors: Sequence[TensorSource],
    *,
    metadata: Mapping[str, str] | None = None,
    sync: bool = False,
) -> None:
    """Create a file with these tensors, on the disk when this returns if `sync`."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.num_bytes
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(
            f"{path.name} would need a header of {len(text)} bytes for {len(tensors)} tensors; the "
            f"limit is {MAX_HEADER_BYTES}. Lower max_shard_bytes or store fewer, larger tensors"
        )
    with naming(path), open(path, "xb", buffering=0) as file:
        write_all(file, len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            write_all(file, tensor.read())
        if sync:
            os.fsync(file.fileno())


def read_header(path: Path) -> dict[str, TensorLocation]:
    """Location of every tensor; raises unless the header is well-formed and fills the file."""
    with open(path, "rb", buffering=0) as file:
        return _parse_header(path, file)


def read_safetensors(
    path: Path, allocate: Callable[[int], tuple[Any, memoryview]]
) -> Iterable[tuple[str, Any]]:
    """Each tensor's name and bytes, read into the buffer that `allocate(num_bytes)` supplies."""
    with naming(path), open(path, "rb", buffering=0) as file:
        for name, location in _parse_header(path, file).items():
            holder, buffer = allocate(location.num_bytes)
            file.seek(location.start)
            read_exactly(file, buffer, path)
            yield name, holder


def read_exactly(file: FileIO, buffer: memoryview, path: Path) -> None:
    while buffer:
        count = file.readinto(buffer)
        if not count:
            raise CheckpointCorruptError(path, ["the file ends before its last tensor"])
        buffer = buffer[count:]


def _parse_header(path: Path, file: FileIO) -> dict[str, TensorLocation]:
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
        raise CheckpointCorruptError(
            path, [f"not a safetensors file: header of {length} bytes in a file of {size}"]
        )
    try:
        locations = _locations(json.loads(file.read(length)), 8 + length)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointCorruptError(
            path, [f"its safetensors header is malformed: {error}"]
        ) from error
    if sum(location.num_bytes for location in locations.values()) != size - 8 - length:
        raise CheckpointCorruptError(path, ["its tensors do not fill the file"])
    return locations


def _locations(header: dict[str, Any], data_start: int) -> dict[str, TensorLocation]:
    locations: dict[str, TensorLocation] = {}
    expected = 0
    entries = [(name, entry) for name, entry in header.items() if name != "__metadata__"]
    for name, entry in sorted(entries, key=lambda item: item[1]["data_offsets"]):
        start, end = entry["data_offsets"]
        shape = tuple(entry["shape"])
        if any(type(extent) is not int or extent < 0 for extent in (*shape, start, end)):
            raise ValueError(f"{name!r} has a negative or fractional extent")
        bits = BITS.get(entry["dtype"])  # unknown: a kind that only transformers reads
        if start != expected or (bits and (end - start) * 8 != prod(shape) * bits):
            raise ValueError(f"{name!r} overlaps, leaves a gap or has the wrong size")
        locations[name] = TensorLocation(
            dtype=entry["dtype"], shape=shape, start=data_start + start, num_bytes=end - start
        )
        expected = end
    return locations

"""A folder that `torch.distributed.checkpoint` wrote, as Megatron does, read without unpickling it.

    .metadata       a pickle: tensors by name, their chunks, and where each chunk is
    __R_N.distcp    archives of `torch.save`, one per chunk, one after the other

The index is read as a description (`torch_file`): nothing is imported and nothing is called. What
does not look like an index is refused, and so is a chunk outside of the folder or of its file.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl.utils.checkpoint.torch_file import (
    ObjectKey,
    Record,
    Slice,
    UnreadablePickleError,
    read_pickle,
    read_torch_tensor,
)

INDEX = ".metadata"
Extents = tuple[int, ...]


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor."""

    start: Extents
    size: Extents
    archive: Slice


@dataclass(frozen=True)
class DistTensor:
    name: str
    shape: Extents
    chunks: list[Chunk]

    def read(self, start: Sequence[int], size: Sequence[int]) -> Tensor:
        """A box of it, in the dtype it was saved in."""
        box, num_read = None, 0
        for chunk in self.chunks:
            lows = [max(a, b) for a, b in zip(start, chunk.start, strict=True)]
            highs = [
                min(a + n, b + m)
                for a, n, b, m in zip(start, size, chunk.start, chunk.size, strict=True)
            ]
            if any(low >= high for low, high in zip(lows, highs, strict=True)):
                continue
            part = read_torch_tensor(chunk.archive)
            if tuple(part.shape) != chunk.size:
                raise ValueError(
                    f"{chunk.archive.name} has the shape {list(part.shape)}, and {INDEX} says "
                    f"{list(chunk.size)} of {self.name}"
                )
            if box is None:
                box = torch.zeros(tuple(size), dtype=part.dtype)
            inside = within(lows, highs, chunk.start)
            box[within(lows, highs, start)] = part[inside]
            num_read += prod(high - low for low, high in zip(lows, highs, strict=True))
        if box is None or num_read != prod(size):
            raise ValueError(f"{self.name}: its chunks do not cover {list(start)} + {list(size)}")
        return box


def within(lows: list[int], highs: list[int], start: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(a - s, b - s) for a, b, s in zip(lows, highs, start, strict=True))


def read_index(folder: Path) -> dict[str, DistTensor]:
    """The tensors of a folder by name; what is not a tensor is left out."""
    file = folder / INDEX
    if not file.is_file():
        raise ValueError(
            f"{folder} has no {INDEX}: it is no distributed checkpoint in the format torch_dist"
        )
    try:
        state = mapping(read_pickle(file.read_bytes()), "Metadata")
        places = dict(chunk_places(folder, state["storage_data"]))
        return dict(tensors(state["state_dict_metadata"], places))
    except (UnreadablePickleError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is no index of a distributed checkpoint: {error!r}") from error


Places = dict[tuple[str, Extents], Slice]


def chunk_places(folder: Path, stored: Any) -> Iterator[tuple[tuple[str, Extents], Slice]]:
    """Where each chunk is, by its tensor's name and its start."""
    for key, value in stored.items():
        index = mapping(key.key if isinstance(key, ObjectKey) else key, "MetadataIndex")
        if index.get("offset") is None:
            continue  # bytes, not a tensor
        place = mapping(value, "_StorageInfo")
        path, offset, length = (place[name] for name in ("relative_path", "offset", "length"))
        if type(path) is not str or Path(path).name != path or (folder / path).is_symlink():
            raise ValueError(f"{folder / INDEX} names {path!r}, which is no file of its folder")
        file = folder / path
        (first, count), size = numbers([offset, length]), file.stat().st_size
        if first + count > size:
            raise ValueError(f"{file} has {size} bytes; {index['fqn']} ends at {first + count}")
        yield (text(index["fqn"]), extents(index["offset"])), Slice(file, first, count)


def tensors(described: Any, places: Places) -> Iterator[tuple[str, DistTensor]]:
    for key, value in described.items():
        if not is_made_by(value, "TensorStorageMetadata"):
            continue
        state, name = mapping(value, "TensorStorageMetadata"), text(key)
        chunks = []
        for one in state["chunks"]:
            box = mapping(one, "ChunkStorageMetadata")
            start = extents(box["offsets"])
            if (name, start) not in places:
                raise ValueError(f"{INDEX} does not say where {name} {list(start)} is")
            chunks.append(Chunk(start, extents(box["sizes"]), places[name, start]))
        yield name, DistTensor(name, extents(state["size"]), chunks)


def is_made_by(value: Any, name: str) -> bool:
    return isinstance(value, Record) and value.is_made_by(name)


def mapping(value: Any, kind: str) -> dict[str, Any]:
    """The state of an object of class `kind`."""
    if not is_made_by(value, kind) or type(value.state) is not dict:
        raise UnreadablePickleError(f"something else stands in place of a {kind}")
    return value.state


def extents(value: Any) -> Extents:
    return numbers(value.arguments[0] if is_made_by(value, "Size") else value)


def numbers(value: Any) -> Extents:
    if type(value) not in (tuple, list) or any(type(n) is not int or n < 0 for n in value):
        raise UnreadablePickleError(f"extents are whole numbers, not {value!r}")
    return tuple(value)


def text(value: Any) -> str:
    if type(value) is not str:
        raise UnreadablePickleError(f"a tensor has a name, not {value!r}")
    return value

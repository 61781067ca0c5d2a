"""The tensors in a file that `torch.save` wrote, without unpickling it.

A file is a zip archive: `data.pkl` says which tensors there are and `data/KEY` holds the bytes of
each storage. The pickle is read as a description (`inert_pickle`), and of the descriptions only
tensors, parameters and DTensors are understood. Bytes are read when a tensor is asked for.
"""

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl.model_merger.inert_pickle import (
    MAX_PICKLE_BYTES,
    Persistent,
    Record,
    Symbol,
    UnreadablePickleError,
    read_pickle,
)

DTYPES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}  # fmt: skip
REBUILDS_TENSOR = "_rebuild_tensor_v2"


@dataclass(frozen=True)
class TorchTensor:
    """A tensor in an archive, not yet read."""

    archive: Path
    storage: str
    dtype: torch.dtype
    num_stored: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def read(self) -> Tensor:
        last = self.offset + sum(
            (n - 1) * step for n, step in zip(self.shape, self.stride, strict=True)
        )
        if prod(self.shape) and not (0 <= self.offset <= last < self.num_stored):
            raise UnreadablePickleError(f"a tensor of {self.archive.name} lies beyond its storage")
        if not prod(self.shape):
            return torch.empty(self.shape, dtype=self.dtype)
        with zipfile.ZipFile(self.archive) as archive:
            octets = bytearray(_entry(archive, f"data/{self.storage}", self._num_bytes))
        stored = torch.frombuffer(octets, dtype=self.dtype)
        return stored.as_strided(self.shape, self.stride, self.offset).contiguous()

    @property
    def _num_bytes(self) -> int:
        return self.num_stored * self.dtype.itemsize


@dataclass(frozen=True)
class TorchShard:
    """One rank's part of a DTensor."""

    local: TorchTensor
    shape: tuple[int, ...]
    sharded_dim: int | None
    """The dimension that is cut; None where every rank holds the whole tensor."""

    place: int
    """Which of the parts along that dimension this is."""

    is_first_copy: bool
    """False on ranks that repeat what others hold."""


def read_torch_file(path: Path, *, rank: int) -> dict[str, TorchTensor | TorchShard]:
    """The tensors of a saved state by name; what is not a tensor is left out."""
    try:
        with zipfile.ZipFile(path) as archive:
            tree = read_pickle(_entry(archive, "data.pkl"))
    except (zipfile.BadZipFile, UnreadablePickleError) as error:
        raise ValueError(
            f"{path} is not a file of tensors that torch.save wrote: {error}"
        ) from error
    described = {name: _described(path, value, rank) for name, value in _mapping(tree).items()}
    return {name: tensor for name, tensor in described.items() if tensor is not None}


def _entry(archive: zipfile.ZipFile, name: str, num_bytes: int | None = None) -> bytes:
    """The bytes of an entry, whatever the archive calls its top folder; never a compressed one."""
    found = [info for info in archive.infolist() if info.filename.partition("/")[2] == name]
    if len(found) != 1:
        raise UnreadablePickleError(f"it has {len(found)} entries {name}")
    info = found[0]
    if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
        raise UnreadablePickleError(f"{name} is compressed, which torch.save does not do")
    if info.file_size > MAX_PICKLE_BYTES if num_bytes is None else info.file_size != num_bytes:
        raise UnreadablePickleError(f"{name} has {info.file_size} bytes")
    return archive.read(info)


def _mapping(value: Any) -> Mapping[str, Any]:
    items = value.items if isinstance(value, Record) else value
    is_ordered = not isinstance(value, Record) or value.is_made_by("OrderedDict")
    if type(items) is not dict or not is_ordered or any(type(key) is not str for key in items):
        raise ValueError("the file does not hold tensors by name")
    return items


def _described(path: Path, value: Any, rank: int) -> TorchTensor | TorchShard | None:
    if not isinstance(value, Record):
        return None
    if value.is_made_by("_rebuild_parameter", "_rebuild_parameter_with_state"):
        value = _argument(value, 0)
        if not isinstance(value, Record):
            return None
    if value.is_made_by(REBUILDS_TENSOR):
        return _tensor(path, value)
    if value.is_made_by("_rebuild_from_type_v2"):
        return _shard(path, value, rank)
    return None


def _tensor(path: Path, record: Any) -> TorchTensor:
    if not isinstance(record, Record) or not record.is_made_by(REBUILDS_TENSOR):
        raise ValueError(f"{path} holds a part of a tensor that is not a plain tensor")
    storage, offset, shape, stride = (_argument(record, place) for place in range(4))
    identity = storage.identity if isinstance(storage, Persistent) else ()
    match identity:
        case ("storage", Symbol(name=kind), str(key), _, int(num_stored)) if kind in DTYPES:
            return TorchTensor(
                archive=path,
                storage=key,
                dtype=DTYPES[kind],
                num_stored=num_stored,
                offset=_extents((offset,))[0],
                shape=_extents(shape),
                stride=_extents(stride),
            )
    raise ValueError(f"{path} holds a tensor of a kind that is not known: {type(storage).__name__}")


def _shard(path: Path, record: Record, rank: int) -> TorchShard:
    state = _dict_with(_argument(record, 3), "_local_tensor", "_spec")
    spec = _dict_with(state["_spec"], "placements", "tensor_meta", "mesh")
    shape = _size(_argument(spec["tensor_meta"], 0))
    mesh = _dict_with(spec["mesh"])
    placements = list(spec["placements"])
    where = mesh.get("_coordinate_on_dim") or ([rank] if len(placements) == 1 else None)
    if where is None or len(where) != len(placements):
        raise ValueError(f"{path} does not say which place of its mesh it comes from")
    cuts: list[tuple[int, int]] = []
    is_first_copy = True
    for placement, place in zip(placements, _extents(tuple(where)), strict=True):
        if isinstance(placement, Record) and placement.is_made_by("Shard"):
            cuts.append((_shard_dim(placement), place))
        elif isinstance(placement, Record) and placement.is_made_by("Replicate"):
            is_first_copy = is_first_copy and place == 0
        else:
            raise ValueError(f"{path} divides a tensor in a way that is not known")
    if len(cuts) > 1:
        raise ValueError(f"{path} divides a tensor twice; merge it where it was saved")
    dim, place = cuts[0] if cuts else (None, 0)
    return TorchShard(
        local=_tensor(path, state["_local_tensor"]),
        shape=shape,
        sharded_dim=dim,
        place=place,
        is_first_copy=is_first_copy,
    )


def _shard_dim(placement: Record) -> int:
    """In the state of the object, or in the call that makes it."""
    state = placement.state
    dim = state["dim"] if isinstance(state, dict) and "dim" in state else _argument(placement, 0)
    return _extents((dim,))[0]


def _argument(record: Any, place: int) -> Any:
    arguments = record.arguments if isinstance(record, Record) else None
    if type(arguments) is not tuple or len(arguments) <= place:
        raise ValueError("a tensor is described with too few arguments")
    return arguments[place]


def _dict_with(value: Any, *keys: str) -> dict[str, Any]:
    """The dictionary with these keys among an object's state and its slots."""
    state = value.state if isinstance(value, Record) else value
    for candidate in state if type(state) is tuple else (state,):
        if type(candidate) is dict and all(key in candidate for key in keys):
            return candidate
    raise ValueError(f"a divided tensor is described without {', '.join(keys) or 'its mesh'}")


def _size(value: Any) -> tuple[int, ...]:
    is_size = isinstance(value, Record) and value.is_made_by("Size")
    return _extents(_argument(value, 0) if is_size else value)


def _extents(value: Any) -> tuple[int, ...]:
    is_plain = type(value) in (tuple, list)
    if not is_plain or any(type(n) is not int or not 0 <= n < 2**48 for n in value):
        raise ValueError("a tensor is described with extents that are not whole numbers")
    return tuple(value)

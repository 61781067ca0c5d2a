"""A batch as one safetensors file, or as the bytes of one.

Every tensor column is an entry of its own (a jagged one is two), so any safetensors tool can read
it. Two further entries hold the rest: `document`, JSON with the columns in order, the object arrays
and meta_info, and `pool`, the bytes of arrays inside those (see `verl.protocol.codec`). Reading
never runs code from a file; a file that is not ours, or is cut off, is a ValueError.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save, save_file
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from verl.protocol.codec import MALFORMED, Encoder, decode
from verl.protocol.serialization import dtype_name, dtype_named, octets_of, plain_data
from verl.utils.tensor_rows import BatchError, compact, jagged, open_jagged

_FORMAT = "verl.DataProto/1"
_DOCUMENT = "document"
_POOL = "pool"


class Fields(NamedTuple):
    """The three fields of a DataProto."""

    batch: TensorDict | None
    non_tensor_batch: dict[str, np.ndarray]
    meta_info: dict[str, Any]


def write_fields(fields: Fields, path: Path) -> None:
    """Write the file beside its place first, so that a file at `path` is always complete."""
    entries = _to_entries(fields)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        save_file(entries, temporary, metadata={"format": _FORMAT})
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_fields(path: Path) -> Fields:
    try:
        entries = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is no batch that save_to_disk has written: {error}") from error
    return _from_entries(entries, str(path))


def dump_fields(fields: Fields) -> bytes:
    return save(_to_entries(fields), metadata={"format": _FORMAT})


def parse_fields(octets: bytes) -> Fields:
    try:
        entries = load(octets)
    except SafetensorError as error:
        raise ValueError(f"{len(octets)} bytes that are no batch: {error}") from error
    return _from_entries(entries, f"a message of {len(octets)} bytes")


# ---- write ---------------------------------------------------------------------------------------


def _to_entries(fields: Fields) -> dict[str, Tensor]:
    writer, encoder = _TableWriter(), Encoder()
    document = {
        "format": _FORMAT,
        "batch": None if fields.batch is None else writer.put_table(fields.batch, prefix=""),
        "non_tensor_batch": encoder.encode(dict(fields.non_tensor_batch), "non_tensor_batch"),
        "meta_info": encoder.encode(dict(fields.meta_info), "meta_info"),
    }
    entries = _without_shared_memory(writer.entries)
    entries[_DOCUMENT] = _as_octets(json.dumps(document, allow_nan=False).encode("ascii"))
    entries[_POOL] = _as_octets(encoder.pool)
    return entries


class _TableWriter:
    """Collects the tensors of a table, and describes where in the file each column is."""

    def __init__(self) -> None:
        self.entries: dict[str, Tensor] = {}
        self._offsets: dict[tuple[int, int], list[Any]] = {}  # see `verl.utils.tensor_rows`

    def put_table(self, batch: TensorDictBase, prefix: str) -> dict[str, Any]:
        # The number keeps entries apart whose column names contain dots and slashes.
        columns = [
            [name, self._put_column(column, f"{prefix}{number}.{name}")]
            for number, (name, column) in enumerate(batch.items())
        ]
        return {"batch_size": list(batch.batch_size), "columns": columns}

    def _put_column(self, column: Any, entry: str) -> dict[str, Any]:
        if isinstance(column, TensorDict):
            return {"table": self.put_table(column, f"{entry}/")}
        if not isinstance(column, Tensor):
            raise BatchError(
                f"cannot write column {entry!r} of type {type(column).__name__}; objects belong "
                f"into non_tensor_batch"
            )
        return (
            self._put_jagged(column, entry)
            if column.is_nested
            else {"dense": self._put(column, entry)}
        )

    def _put_jagged(self, column: Tensor, entry: str) -> dict[str, Any]:
        original, parts = open_jagged(column), open_jagged(compact(column))
        key = (id(original.offsets), id(original.lengths))
        if key not in self._offsets:
            self._offsets[key] = self._put(parts.offsets, f"{entry}/offsets")
        return {"jagged": [self._put(parts.values, entry), self._offsets[key], parts.dim]}

    def _put(self, tensor: Tensor, entry: str) -> list[Any]:
        if tensor.layout is not torch.strided:
            raise BatchError(f"cannot write column {entry!r} of layout {tensor.layout}")
        tensor = plain_data(tensor)
        place = [entry, dtype_name(tensor.dtype), list(tensor.shape)]
        # Types that not every version of the file format knows are stored as their bytes.
        is_exotic = tensor.is_complex() or (tensor.is_floating_point() and tensor.itemsize == 1)
        self.entries[entry] = octets_of(tensor) if is_exotic else tensor
        return place


def _without_shared_memory(entries: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Columns may be views of one another; safetensors wants each to stand alone."""
    seen: set[int] = set()
    separate: dict[str, Tensor] = {}
    for name, tensor in entries.items():
        memory = tensor.untyped_storage().data_ptr()
        separate[name] = tensor.clone() if memory in seen else tensor
        seen.add(memory)
    return separate


def _as_octets(octets: bytes) -> Tensor:
    return torch.tensor(np.frombuffer(octets, dtype=np.uint8))


# ---- read ----------------------------------------------------------------------------------------


def _from_entries(entries: Mapping[str, Tensor], origin: str) -> Fields:
    try:
        document = json.loads(entries[_DOCUMENT].numpy().tobytes())
        if document["format"] != _FORMAT:
            raise ValueError(f"format {document['format']!r} is not {_FORMAT!r}")
        pool = memoryview(entries[_POOL].numpy().tobytes())
        table = document["batch"]
        return Fields(
            batch=None if table is None else _TableReader(entries).get_table(table),
            non_tensor_batch=decode(document["non_tensor_batch"], pool),
            meta_info=decode(document["meta_info"], pool),
        )
    except MALFORMED as error:
        raise ValueError(
            f"{origin} is no batch that DataProto has written, or is damaged: {error!r}"
        ) from error


class _TableReader:
    """Finds the columns that a document describes."""

    def __init__(self, entries: Mapping[str, Tensor]) -> None:
        self._entries = entries
        self._offsets: dict[str, Tensor] = {}

    def get_table(self, table: Mapping[str, Any]) -> TensorDict:
        columns = {name: self._get_column(column) for name, column in table["columns"]}
        return TensorDict(columns, batch_size=table["batch_size"])

    def _get_column(self, column: Mapping[str, Any]) -> Any:
        ((kind, body),) = column.items()
        if kind == "table":
            return self.get_table(body)
        if kind == "dense":
            return self._get(*body)
        if kind == "jagged":
            values, offsets, dim = body
            shared = self._offsets.setdefault(offsets[0], self._get(*offsets))
            return jagged(self._get(*values), shared, dim)
        raise ValueError(f"unknown kind of column {kind!r}")

    def _get(self, entry: str, dtype: str, shape: list[int]) -> Tensor:
        return octets_of(self._entries[entry]).view(dtype_named(dtype)).reshape(shape)

"""A nested state on disk: `NAME.json` for its structure, `NAME*.safetensors` for its tensors.

    save_state(folder, "optimizer", {"step": 3, "moments": {0: tensor, ...}})
    load_state(folder, "optimizer")  # the same state, every type as it was

Tensors are grouped into files of at most `max_shard_bytes` and copied one at a time, so saving
needs memory for one tensor, not for the state. See `plain_state` for what a state may hold. Syncing
and hashing is left to `commit`; a folder must pass `verify` before anything is loaded from it.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from verl.utils.checkpoint.layout import CheckpointCorruptError, naming, write_all
from verl.utils.checkpoint.safetensors_file import (
    TensorSource,
    read_safetensors,
    write_safetensors,
)
from verl.utils.checkpoint.tensor_store import Encoder, NamedArray, decode

Stored = TypeVar("Stored", NamedArray, TensorSource)

FORMAT = "verl-state"
VERSION = 1
MAX_TREE_BYTES = 64 << 20
DEFAULT_SHARD_BYTES = 5 << 30
MAX_TENSORS_PER_FILE = 20_000

# What the format has a name for; any other dtype is stored as its bytes.
SAFETENSORS_DTYPES = {
    "bool": "BOOL", "|b1": "BOOL", "uint8": "U8", "|u1": "U8", "int8": "I8", "|i1": "I8",
    "uint16": "U16", "<u2": "U16", "int16": "I16", "<i2": "I16",
    "uint32": "U32", "<u4": "U32", "int32": "I32", "<i4": "I32",
    "uint64": "U64", "<u8": "U64", "int64": "I64", "<i8": "I64",
    "float16": "F16", "<f2": "F16", "float32": "F32", "<f4": "F32", "float64": "F64", "<f8": "F64",
    "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip


@dataclass(frozen=True)
class EncodedState:
    """A state as it was when it was encoded, but for the contents of its arrays and tensors."""

    tree: Any
    arrays: list[NamedArray]


def encode_state(state: Any) -> EncodedState:
    """Refuses, with its place, what is not plain data."""
    encoder = Encoder()
    return EncodedState(encoder.encode(state), encoder.arrays)


def save_state(
    folder: str | Path, name: str, state: Any, *, max_shard_bytes: int = DEFAULT_SHARD_BYTES
) -> None:
    """Write `state` into `folder` under `name`."""
    write_state(folder, name, encode_state(state), max_shard_bytes=max_shard_bytes)


def write_state(
    folder: str | Path,
    name: str,
    state: EncodedState,
    *,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """The second half of `save_state`."""
    folder = Path(folder)
    shards = list(grouped(state.arrays, max_shard_bytes))
    files = [f"{name}{file_suffix(number, len(shards))}" for number in range(len(shards))]
    content = {"format": FORMAT, "version": VERSION, "files": files, "tree": state.tree}
    text = json.dumps(content, separators=(",", ":")).encode()
    if len(text) > MAX_TREE_BYTES:
        raise ValueError(
            f"state {name!r} needs {len(text)} bytes of JSON; the limit is {MAX_TREE_BYTES}. Long "
            "lists of numbers belong in NumPy arrays or tensors"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for file, shard in zip(files, shards, strict=True):
        write_safetensors(folder / file, [as_source(array) for array in shard])
    path = folder / f"{name}.json"
    with naming(path), open(path, "xb", buffering=0) as stream:
        write_all(stream, text)


def has_state(folder: str | Path, name: str) -> bool:
    return (Path(folder) / f"{name}.json").is_file()


def load_state(folder: str | Path, name: str) -> Any:
    """What `save_state` was given; a file that it did not write is a `CheckpointCorruptError`."""
    path = Path(folder) / f"{name}.json"
    try:
        content = json.loads(_read_text(path))
        if (content["format"], content["version"]) != (FORMAT, VERSION):
            raise ValueError(f"format {content['format']!r} version {content['version']!r}")
        octets: dict[str, torch.Tensor] = {}
        for file in content["files"]:
            if Path(file).name != file or not file.endswith(".safetensors"):
                raise ValueError(f"it names {file!r}, which is not a file beside it")
            octets.update(read_safetensors(path.parent / file, _allocate))
        return decode(content["tree"], octets)
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise CheckpointCorruptError(path, [f"not a saved state: {error}"]) from error


def _read_text(path: Path) -> bytes:
    with open(path, "rb") as stream:
        text = stream.read(MAX_TREE_BYTES + 1)
    if len(text) > MAX_TREE_BYTES:
        raise ValueError(f"it is larger than {MAX_TREE_BYTES} bytes")
    return text


def grouped(arrays: Iterable[Stored], max_shard_bytes: int) -> Iterator[list[Stored]]:
    """Consecutive arrays of at most that many bytes together; a larger one is in a file alone."""
    shard: list[Stored] = []
    num_bytes = 0
    for array in arrays:
        is_full = num_bytes + array.num_bytes > max_shard_bytes
        if shard and (is_full or len(shard) == MAX_TENSORS_PER_FILE):
            yield shard
            shard, num_bytes = [], 0
        shard.append(array)
        num_bytes += array.num_bytes
    if shard:
        yield shard


def file_suffix(number: int, total: int) -> str:
    return ".safetensors" if total == 1 else f"-{number + 1:05d}-of-{total:05d}.safetensors"


def as_source(array: NamedArray) -> TensorSource:
    dtype = SAFETENSORS_DTYPES.get(array.dtype)
    return TensorSource(
        name=array.name,
        dtype=dtype or "U8",
        shape=tuple(array.array.shape) if dtype else (array.num_bytes,),
        num_bytes=array.num_bytes,
        read=array.read,
    )


def _allocate(num_bytes: int) -> tuple[torch.Tensor, memoryview]:
    octets = torch.empty(num_bytes, dtype=torch.uint8)
    return octets, octets.numpy().data

"""A nested state on disk: `NAME.json` for its structure, `NAME*.safetensors` for its tensors.

    save_state(folder, "optimizer", {"step": 3, "moments": {0: tensor, ...}})
    load_state(folder, "optimizer")  # the same state, every type as it was

Tensors are grouped into files of at most `max_shard_bytes` and copied one at a time, so saving
needs memory for one tensor, not for the state. Syncing and hashing is left to `store`; a folder is
verified before anything is loaded from it.

What JSON has is written as it is. What it lacks becomes an object whose one key begins with "$":

    tuple                     {"$tuple": [...]}
    int beyond 64 bits        {"$int": hexadecimal}
    nan, inf                  {"$float": its eight bytes in hexadecimal}
    bytes                     {"$bytes": base64}
    text no UTF-8 can hold    {"$text": base64}
    dict with other keys      {"$dict": [[key, value], ...]}
    NumPy scalar              {"$scalar": [dtype, base64]}
    NumPy array               {"$array": [name, dtype, shape]}
    torch tensor              {"$tensor": [name, dtype, shape]}

The bytes of arrays and tensors lie in the tensor files under that name. Nothing else can be
written, so what is read can only be data. A `Parameter` is written as the tensor it is; tensors
come back on the CPU, contiguous and without gradient.
"""

import base64
import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from verl.utils.checkpoint.layout import CheckpointCorruptError, naming, write_all
from verl.utils.checkpoint.safetensors_file import (
    TensorSource,
    read_safetensors,
    write_safetensors,
)


@dataclass(frozen=True, kw_only=True)
class NamedArray:
    """An array or tensor met in a state, not yet copied."""

    name: str
    array: np.ndarray | Tensor

    @property
    def dtype(self) -> str:
        dtype = self.array.dtype
        return dtype.str if isinstance(dtype, np.dtype) else str(dtype).removeprefix("torch.")

    @property
    def num_bytes(self) -> int:
        return self.array.nbytes

    def read(self) -> memoryview:
        """Its bytes, in row-major order; this is the only copy ever made, if one is needed."""
        if self.num_bytes == 0:
            return memoryview(b"")
        if isinstance(self.array, np.ndarray):
            return np.ascontiguousarray(self.array).reshape(-1).view(np.uint8).data
        whole = self.array.detach().resolve_conj().resolve_neg().cpu().contiguous()
        # A single element may carry any stride, and `view` insists on 1.
        return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8).numpy().data


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
    """Refuses values that are not plain data, and names their path."""
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


MAX_DEPTH = 200  # the JSON parser recurses, and so do we
TORCH_DTYPES = {
    name: dtype
    for name, dtype in vars(torch).items()
    if isinstance(dtype, torch.dtype) and str(dtype) == f"torch.{name}"
}


_ARRAY_KINDS = frozenset("biufcSUmM")
_SCALAR_KINDS = frozenset("biufcmM")
_CONTAINERS = (dict, list, tuple)


def _to_text(octets: bytes) -> str:
    return base64.b64encode(octets).decode("ascii")


class Encoder:
    """Turns a state into what `json.dumps` accepts and collects its arrays in `arrays`."""

    def __init__(self) -> None:
        self.arrays: list[NamedArray] = []
        self._path: list[str] = []  # where we are, for names and errors
        self._open: list[int] = []  # the containers we are in, to notice one that contains itself

    def encode(self, value: Any) -> Any:
        kind = type(value)
        if kind is bool or value is None:
            return value
        if kind is int:
            return value if -(2**63) <= value < 2**63 else {"$int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}
        if kind is str:
            return value if is_unicode(value) else {"$text": _surrogates_to_text(value)}
        if kind is bytes:
            return {"$bytes": _to_text(value)}
        if kind in _CONTAINERS:
            return self._encode_container(value)
        if kind in (Tensor, torch.nn.Parameter):
            return self._encode_tensor(value)
        if kind is np.ndarray and value.dtype.kind in _ARRAY_KINDS:
            return {"$array": self._put(value)}
        if isinstance(value, np.generic) and value.dtype.kind in _SCALAR_KINDS:
            return {"$scalar": [value.dtype.str, _to_text(value.tobytes())]}
        raise self._refusal(f"{kind.__module__}.{kind.__qualname__} is not plain data")

    def _encode_container(self, value: Any) -> Any:
        if id(value) in self._open:
            raise self._refusal("it contains itself")
        if len(self._open) == MAX_DEPTH:
            raise self._refusal(f"it is nested more than {MAX_DEPTH} levels deep")
        self._open.append(id(value))
        if isinstance(value, dict):
            encoded = self._encode_dict(value)
        else:
            items = [self._encode_at(f"[{index}]", item) for index, item in enumerate(value)]
            encoded = items if isinstance(value, list) else {"$tuple": items}
        self._open.pop()
        return encoded

    def _encode_dict(self, value: dict[Any, Any]) -> dict[str, Any]:
        for key in value:
            if type(key) not in (str, int):
                raise self._refusal(f"its key {key!r} is neither text nor a whole number")
        encoded = [self._encode_at(f"[{key!r}]", item) for key, item in value.items()]
        if all(type(key) is str and key[:1] != "$" and is_unicode(key) for key in value):
            return dict(zip(value, encoded, strict=True))
        keys = [self.encode(key) for key in value]
        return {"$dict": [list(pair) for pair in zip(keys, encoded, strict=True)]}

    def _encode_tensor(self, value: Tensor) -> dict[str, Any]:
        if value.layout is not torch.strided or value.is_quantized or value.is_nested:
            raise self._refusal("sparse, nested and quantized tensors are not plain data")
        if value.device.type == "meta":
            raise self._refusal("a tensor on the meta device has no contents")
        return {"$tensor": self._put(value)}

    def _encode_at(self, step: str, value: Any) -> Any:
        self._path.append(step)
        encoded = self.encode(value)
        self._path.pop()
        return encoded

    def _put(self, array: np.ndarray | Tensor) -> list[Any]:
        """Names are unique by their number; the path after it is for people who look inside."""
        path = "".join(self._path).encode("ascii", "backslashreplace").decode()
        named = NamedArray(name=f"{len(self.arrays)} {path[:160]}", array=array)
        self.arrays.append(named)
        return [named.name, named.dtype, list(array.shape)]

    def _refusal(self, reason: str) -> ValueError:
        return ValueError(
            f"cannot save state{''.join(self._path)}: {reason}. What can be saved is None, bool, "
            "numbers, text, bytes, lists, tuples, dictionaries with text or whole numbers as keys, "
            "NumPy arrays and dense tensors"
        )


def decode(tree: Any, octets: Mapping[str, Tensor]) -> Any:
    """The state that `Encoder.encode` was given; `octets` has the bytes of each array by name.

    Raises ValueError, LookupError or TypeError for a tree that no encoder wrote.
    """
    if isinstance(tree, list):
        return [decode(item, octets) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if len(tree) == 1:
        ((tag, body),) = tree.items()
        if tag.startswith("$"):
            return _DECODERS[tag](body, octets)
    return {key: decode(item, octets) for key, item in tree.items()}


def is_unicode(text: str) -> bool:
    """False for lone surrogates: JSON would join two of them into another character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _decode_dict(body: Any, octets: Mapping[str, Tensor]) -> dict[Any, Any]:
    return {decode(key, octets): decode(item, octets) for key, item in body}


def _decode_scalar(body: Any, octets: Mapping[str, Tensor]) -> np.generic:
    dtype, text = body
    return np.frombuffer(_from_text(text), dtype=_array_dtype(dtype))[0]


def _decode_array(body: Any, octets: Mapping[str, Tensor]) -> np.ndarray:
    name, dtype, shape = body
    return octets[name].numpy().view(_array_dtype(dtype)).reshape(shape)


def _decode_tensor(body: Any, octets: Mapping[str, Tensor]) -> Tensor:
    name, dtype, shape = body
    return octets[name].view(TORCH_DTYPES[dtype]).reshape(shape)


def _from_text(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


_DECODERS: dict[str, Callable[[Any, Mapping[str, Tensor]], Any]] = {
    "$tuple": lambda body, octets: tuple(decode(body, octets)),
    "$int": lambda body, octets: int(body, 16),
    "$float": lambda body, octets: struct.unpack(">d", bytes.fromhex(body))[0],
    "$bytes": lambda body, octets: _from_text(body),
    "$text": lambda body, octets: _from_text(body).decode("utf-8", "surrogatepass"),
    "$dict": _decode_dict,
    "$scalar": _decode_scalar,
    "$array": _decode_array,
    "$tensor": _decode_tensor,
}


def _array_dtype(name: str) -> np.dtype:
    dtype = np.dtype(name)
    if dtype.kind not in _ARRAY_KINDS:
        raise ValueError(f"{name!r} is not the type of a plain array")
    return dtype


def _surrogates_to_text(text: str) -> str:
    return _to_text(text.encode("utf-8", "surrogatepass"))

"""Python values as JSON and back, types included.

JSON knows fewer types than a batch holds. What it lacks becomes an object with one key that starts
with "$", and a dictionary that uses such keys itself is written as "$dict":

    tuple                {"$tuple": [...]}
    nan, inf             {"$float": "nan"}
    bytes                {"$bytes": base64}
    other dictionary     {"$dict": [[key, value], ...]}
    NumPy scalar         {"$scalar": [dtype, base64]}
    NumPy array          {"$array": [dtype, shape, first byte, end]}
    object array         {"$objects": [shape, [...]]}
    torch tensor         {"$tensor": [dtype, shape, first byte, end]}

Arrays and tensors lie in one pool of bytes beside the text. Nothing else can be written, so nothing
read from a file can be anything but data. `dumps` and `loads` put both into one message.
"""

import base64
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.protocol.ops import object_array
from verl.protocol.serialization import deserialize_single_tensor, serialize_single_tensor

_AS_IS = {type(None), bool, int, str}
_ARRAY_KINDS = frozenset("biufcSUmM")
_LENGTH = 8  # bytes
_MAX_DEPTH = 100  # we recurse, five calls a level, and so does the JSON parser


class Encoder:
    """Turns values into what `json.dumps` accepts, and collects the bytes of arrays in a pool."""

    def __init__(self) -> None:
        self._pool: list[bytes] = []
        self._pool_size = 0
        self._path: list[str] = []  # where we are, for errors
        self._open: list[int] = []  # the containers we are in, to notice one that contains itself

    @property
    def pool(self) -> bytes:
        return b"".join(self._pool)

    def encode(self, value: Any, place: str) -> Any:
        """`place` names the value in errors."""
        self._path = [place]
        return self._encode(value)

    def _encode(self, value: Any) -> Any:
        kind = type(value)
        if kind in _AS_IS:
            return value
        if kind is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        if kind is bytes:
            return {"$bytes": _to_text(value)}
        if kind in (list, tuple, dict) or (kind is np.ndarray and value.dtype == object):
            return self._encode_container(value)
        if kind is Tensor and value.layout is torch.strided:
            dtype, shape, octets = serialize_single_tensor(value)
            return {"$tensor": [dtype, list(shape), *self._put(octets.tobytes())]}
        if kind is np.ndarray and value.dtype.kind in _ARRAY_KINDS:
            return {"$array": [value.dtype.str, list(value.shape), *self._put(value.tobytes())]}
        if isinstance(value, np.generic) and value.dtype.kind in _ARRAY_KINDS:
            return {"$scalar": [value.dtype.str, _to_text(value.tobytes())]}
        raise self._refusal(f"{kind.__module__}.{kind.__qualname__} is not plain data")

    def _encode_container(self, value: Any) -> Any:
        if id(value) in self._open:
            raise self._refusal("it contains itself")
        if len(self._open) == _MAX_DEPTH:
            raise self._refusal(f"it is nested more than {_MAX_DEPTH} levels deep")
        self._open.append(id(value))
        if isinstance(value, dict):
            encoded = self._encode_dict(value)
        elif isinstance(value, np.ndarray):
            encoded = {"$objects": [list(value.shape), self._encode_all(value.ravel().tolist())]}
        else:
            items = self._encode_all(value)
            encoded = items if isinstance(value, list) else {"$tuple": items}
        self._open.pop()
        return encoded

    def _encode_all(self, values: Sequence[Any]) -> list[Any]:
        if _AS_IS.issuperset(map(type, values)):
            return list(values)
        return [self._encode_at(f"[{number}]", value) for number, value in enumerate(values)]

    def _encode_dict(self, value: dict[Any, Any]) -> dict[str, Any]:
        encoded = [self._encode_at(f"[{key!r}]", entry) for key, entry in value.items()]
        if all(type(key) is str and not key.startswith("$") for key in value):
            return dict(zip(value, encoded, strict=True))
        keys = [self._encode_at(" key", key) for key in value]
        return {"$dict": [list(pair) for pair in zip(keys, encoded, strict=True)]}

    def _encode_at(self, step: str, value: Any) -> Any:
        self._path.append(step)
        encoded = self._encode(value)
        self._path.pop()
        return encoded

    def _put(self, octets: bytes) -> tuple[int, int]:
        """Where in the pool the bytes begin and end."""
        first = self._pool_size
        self._pool.append(octets)
        self._pool_size += len(octets)
        return first, self._pool_size

    def _refusal(self, reason: str) -> ValueError:
        return ValueError(
            f"cannot write {''.join(self._path)}: {reason}. What can be written is None, numbers, "
            f"text, bytes, lists, tuples, dictionaries, NumPy arrays and dense tensors; convert "
            f"the value, or leave it out with data.select(...)"
        )


def decode(tree: Any, pool: memoryview) -> Any:
    """The value that `Encoder.encode` was given; a ValueError or LookupError for anything else."""
    if isinstance(tree, list):
        return [decode(entry, pool) for entry in tree]
    if not isinstance(tree, dict):
        return tree
    if len(tree) == 1:
        ((tag, body),) = tree.items()
        if tag.startswith("$"):
            return _DECODERS[tag](body, pool)
    return {key: decode(entry, pool) for key, entry in tree.items()}


def dumps(value: Any, place: str) -> bytes:
    """One message: length of the text, text, pool; `place` names the value in errors."""
    encoder = Encoder()
    text = json.dumps(encoder.encode(value, place), allow_nan=False).encode("ascii")
    return b"".join((len(text).to_bytes(_LENGTH, "big"), text, encoder.pool))


def loads(message: bytes | bytearray | memoryview) -> Any:
    """The value that `dumps` was given; a ValueError for anything that it has not written."""
    view = memoryview(message)
    start = _LENGTH + int.from_bytes(view[:_LENGTH], "big")
    try:
        return decode(json.loads(bytes(view[_LENGTH:start])), view[start:])
    except MALFORMED as error:
        raise ValueError(f"{len(view)} bytes that are no plain data: {error!r}") from error


MALFORMED = (ValueError, LookupError, TypeError, AttributeError, RuntimeError, ArithmeticError)
"""What `decode` raises for what `Encoder` has not written; too deep is a RuntimeError."""


def _decode_dict(body: Any, pool: memoryview) -> dict[Any, Any]:
    return {decode(key, pool): decode(entry, pool) for key, entry in body}


def _decode_scalar(body: Any, pool: memoryview) -> np.generic:
    dtype, text = body
    return np.frombuffer(_from_text(text), dtype=_array_dtype(dtype))[0]


def _decode_array(body: Any, pool: memoryview) -> np.ndarray:
    dtype, shape, first, end = body
    return np.frombuffer(pool[first:end], dtype=_array_dtype(dtype)).reshape(shape).copy()


def _decode_objects(body: Any, pool: memoryview) -> np.ndarray:
    shape, entries = body
    return object_array(decode(entries, pool)).reshape(shape)


def _decode_tensor(body: Any, pool: memoryview) -> Tensor:
    dtype, shape, first, end = body
    return deserialize_single_tensor((dtype, shape, bytes(pool[first:end])))


_DECODERS: dict[str, Callable[[Any, memoryview], Any]] = {
    "$tuple": lambda body, pool: tuple(decode(body, pool)),
    "$float": lambda body, pool: float(body),
    "$bytes": lambda body, pool: _from_text(body),
    "$dict": _decode_dict,
    "$scalar": _decode_scalar,
    "$array": _decode_array,
    "$objects": _decode_objects,
    "$tensor": _decode_tensor,
}


def _array_dtype(name: str) -> np.dtype:
    dtype = np.dtype(name)
    if dtype.kind not in _ARRAY_KINDS:
        raise ValueError(f"{name!r} is not the type of a plain array")
    return dtype


def _to_text(octets: bytes) -> str:
    return base64.b64encode(octets).decode("ascii")


def _from_text(text: str) -> bytes:
    return base64.b64decode(text, validate=True)

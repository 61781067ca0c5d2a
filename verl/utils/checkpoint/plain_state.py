"""Nested Python state as JSON text plus arrays, and back, every type as it was.

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

The bytes of arrays and tensors lie elsewhere under that name. Nothing else can be written, so what
is read can only be data. A `Parameter` is written as the tensor it is; tensors come back on the
CPU, contiguous and without gradient.
"""

import base64
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

MAX_DEPTH = 200  # the JSON parser recurses, and so do we
TORCH_DTYPES = {
    name: dtype
    for name, dtype in vars(torch).items()
    if isinstance(dtype, torch.dtype) and str(dtype) == f"torch.{name}"
}
_ARRAY_KINDS = frozenset("biufcSUmM")
_SCALAR_KINDS = frozenset("biufcmM")
_CONTAINERS = (dict, list, tuple)


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
            items = [self._encode_at(f"[{place}]", item) for place, item in enumerate(value)]
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


def _to_text(octets: bytes) -> str:
    return base64.b64encode(octets).decode("ascii")


def _from_text(text: str) -> bytes:
    return base64.b64decode(text, validate=True)

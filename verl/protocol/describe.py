"""A batch in words: what columns there are, and how much memory they take."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

_GIB = 1024**3


def describe_columns(
    columns: Mapping[str, Any], arrays: Mapping[str, np.ndarray], meta_info: Mapping[str, Any]
) -> str:
    """One line per entry, `name: shape (dtype) device` for tensors."""
    lines = ["batch"]
    lines += [f"  {name}: {_form(column)}" for name, column in columns.items()]
    lines += ["non_tensor_batch"]
    lines += [f"  {name}: {array.shape} ({array.dtype})" for name, array in arrays.items()]
    lines += ["meta_info"]
    lines += [f"  {name}: {type(value).__name__}" for name, value in meta_info.items()]
    return "\n".join(lines)


def describe_size(columns: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> str:
    """Memory of the columns; an object array counts its pointers, not the objects."""
    tensors = sum(_num_bytes(tensor) for tensor in columns.values()) / _GIB
    objects = sum(array.nbytes for array in arrays.values()) / _GIB
    return f"Size of tensordict: {tensors} GB, size of non_tensor_batch: {objects} GB"


def _form(column: Any) -> str:
    kind = column.dtype if isinstance(column, Tensor) else type(column).__name__
    return f"{tuple(column.shape)} ({kind}) {column.device}"


def _num_bytes(column: Any) -> int:
    if not isinstance(column, Tensor):
        return sum(_num_bytes(inner) for inner in column.values())
    values = column.values() if column.is_nested else column
    return values.numel() * values.element_size()  # pyright: ignore[reportAttributeAccessIssue]

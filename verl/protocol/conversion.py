"""What goes into a batch, from the forms it comes in: dictionaries, lists, TensorDicts."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from tensordict import NonTensorData, NonTensorStack, TensorDictBase
from torch import Tensor

from verl.utils.tensor_rows import BatchError, Column, is_nested, open_jagged


def object_array(values: Iterable[Any]) -> np.ndarray:
    """A 1-D array with one object per row, be it a list, an array or a number.

    `np.array(values, dtype=object)` makes a second dim of lists that happen to be equally long.
    """
    return np.fromiter(values, dtype=object)


def replace_lists_by_arrays(non_tensors: dict[str, Any]) -> None:
    for key, values in non_tensors.items():
        if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
            raise BatchError(
                f"non_tensors[{key!r}] needs one entry per row, got a {type(values).__name__}; "
                f"what holds for the whole batch belongs into meta_info"
            )
        if not isinstance(values, np.ndarray):
            non_tensors[key] = object_array(values)


def common_batch_dims(tensors: Mapping[str, Column], num_batch_dims: int) -> list[int]:
    """The first `num_batch_dims` dims, which all columns must have in common."""
    if num_batch_dims < 1:
        raise BatchError(f"num_batch_dims must be at least 1, got {num_batch_dims}")
    shapes = {key: _leading_dims(key, tensor, num_batch_dims) for key, tensor in tensors.items()}
    if len(set(shapes.values())) > 1:
        raise BatchError(
            f"all tensors must have the same first {num_batch_dims} dim(s), got {shapes}"
        )
    return list(next(iter(shapes.values()), ()))


def _leading_dims(key: str, tensor: Any, num_dims: int) -> tuple[int, ...]:
    if not isinstance(tensor, Tensor | TensorDictBase):
        raise BatchError(f"tensors[{key!r}] must be a torch.Tensor, got {type(tensor).__name__}")
    if is_nested(tensor):
        open_jagged(tensor)  # refuses the layout that has no shape
    if len(tensor.shape) < num_dims:
        raise BatchError(
            f"tensor {key!r} of shape {tuple(tensor.shape)} has fewer than {num_dims} dim(s)"
        )
    return tuple(tensor.shape[:num_dims])


def sort_single_dict(
    data: Mapping[str, Tensor | np.ndarray],
) -> tuple[dict[str, Tensor], dict[str, np.ndarray]]:
    """The tensors and the arrays of one dictionary."""
    tensors: dict[str, Tensor] = {}
    arrays: dict[str, np.ndarray] = {}
    for key, value in data.items():
        if isinstance(value, Tensor):
            tensors[key] = value
        elif isinstance(value, np.ndarray):
            arrays[key] = value
        else:
            raise BatchError(
                f"{key!r} must be a torch.Tensor or an np.ndarray, got {type(value).__name__}"
            )
    return tensors, arrays


def sort_tensordict(
    tensor_dict: TensorDictBase,
) -> tuple[dict[str, Any], dict[str, np.ndarray], dict[str, Any]]:
    """Tensors, one object per row (as arrays), and one value per batch."""
    tensors: dict[str, Any] = {}
    arrays: dict[str, np.ndarray] = {}
    shared: dict[str, Any] = {}
    for key, entry in tensor_dict.items():
        if isinstance(entry, NonTensorStack):
            arrays[key] = object_array(entry.tolist())
        elif isinstance(entry, NonTensorData):
            shared[key] = entry.data
        else:
            tensors[key] = entry
    return tensors, arrays, shared


def check_distinct(*fields: Mapping[str, Any]) -> None:
    names = [name for field in fields for name in field]
    clash = sorted({name for name in names if names.count(name) > 1})
    if clash:
        raise BatchError(f"one TensorDict cannot hold several entries named {clash}")

"""Operations on the columns of a batch: check, choose, convert, join, fold, describe.

Equal values merge where batches meet, and a conflict is an error that names it. A batch is cut into
equal chunks only, because unequal ones usually are a mistake in a batch size, unless
`DataProtoConfig.auto_padding`, the batch's `meta_info` or `VERL_AUTO_PADDING` allow it.

    fold_batch_dim     (B, ...)           -> (B / k, k, ...)     rows of a group side by side
    unfold_batch_dim   (B / k, k, ...)    -> (B, ...)            the inverse
    unfold_columns     (B, n * k) columns -> (B * n, k)          other columns are repeated n times
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torch import Tensor

from verl.utils.environment import auto_padding as auto_padding_from_environment
from verl.utils.tensor_rows import BatchError, Column, deep_equal, is_nested, open_jagged

if TYPE_CHECKING:
    from verl.protocol.data_proto import DataProto


def union_numpy_dict(
    tensor_dict1: dict[str, np.ndarray], tensor_dict2: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Add the arrays of the second to the first and return it; arrays in both must be equal.

    Equal means deep equality: NaN is NaN, and object arrays are compared by what is in them.
    """
    for key, array in tensor_dict2.items():
        if not isinstance(array, np.ndarray):
            raise BatchError(f"array {key!r} must be an np.ndarray, got {type(array).__name__}")
        if key in tensor_dict1 and not deep_equal(tensor_dict1[key], array):
            raise BatchError(
                f"cannot unite batches: array {key!r} is in both and not equal "
                f"(`{key}` in tensor_dict1 and tensor_dict2 are not the same object)"
            )
    for key, array in tensor_dict2.items():
        tensor_dict1.setdefault(key, array)
    return tensor_dict1


def union_meta_info(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """One new dictionary of both; values in both must be equal, but `metrics` are put together."""
    here, there = first.get("metrics"), second.get("metrics")
    if isinstance(here, Mapping) and isinstance(there, Mapping):
        first = {**first, "metrics": {**here, **there}}
    for key, value in second.items():
        is_merged = key == "metrics" and isinstance(first.get(key), Mapping)
        if key in first and not is_merged and not deep_equal(first[key], value):
            raise BatchError(
                f"cannot unite batches: meta_info {key!r} is {first[key]!r} and {value!r}"
            )
    return {**second, **first}


def concat_meta_info(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The meta_info of parts that become one batch.

    `metrics` (a dictionary per part, or a list of them) are collected into one dictionary of lists;
    any other key must have the same value wherever it occurs.
    """
    merged: dict[str, Any] = {}
    metrics: list[Mapping[str, Any]] = []
    for meta_info in parts:
        for key, value in meta_info.items():
            if key == "metrics":
                metrics += [] if value is None else value if isinstance(value, list) else [value]
            elif not deep_equal(merged.setdefault(key, value), value):
                raise BatchError(
                    f"Conflicting values for meta_info key {key!r}: {merged[key]!r} and {value!r}"
                )
    if metrics:
        merged["metrics"] = list_of_dict_to_dict_of_list(metrics)
    return merged


def list_of_dict_to_dict_of_list(list_of_dict: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """[{a: 1}, {a: 2}] -> {a: [1, 2]}; every dictionary must have the keys of the first."""
    if not list_of_dict:
        return {}
    keys = list_of_dict[0].keys()
    for number, entry in enumerate(list_of_dict):
        if entry.keys() != keys:
            raise BatchError(
                f"all dictionaries must have the same keys: number 0 has {sorted(keys)}, "
                f"number {number} has {sorted(entry.keys())}"
            )
    return {key: [entry[key] for entry in list_of_dict] for key in keys}


Entry = TypeVar("Entry")


def select_columns(batch: TensorDict | None, keys: Iterable[str] | None) -> TensorDict | None:
    """A table of the columns `keys`, or of all for None, that shares their tensors."""
    if batch is not None:
        return batch.select(*(batch.keys() if keys is None else keys))
    missing = list(keys or ())
    if missing:
        raise KeyError(f"there are no tensors {missing}: the batch has no tensors at all")
    return None


def pick(entries: Mapping[str, Entry], keys: Iterable[str] | None) -> dict[str, Entry]:
    """The entries of `keys` that exist; all entries for None."""
    return {key: entries[key] for key in (entries if keys is None else keys) if key in entries}


def check_present(keys: Iterable[str], entries: Collection[str], action: str) -> None:
    missing = [key for key in keys if key not in entries]
    if missing:
        raise BatchError(f"cannot {action} {missing}; there is {sorted(entries)}")


def renaming(old_keys: Any, new_keys: Any, present: Collection[str]) -> dict[str, str]:
    """Old name to new name, for two names or two equally long lists of names."""
    old, new = _as_names(old_keys, "old_keys"), _as_names(new_keys, "new_keys")
    if len(old) != len(new):
        raise BatchError(f"cannot rename {len(old)} columns to {len(new)} names: {old} to {new}")
    check_present(old, present, "rename")
    names = [name for name in present if name not in old] + new
    if len(set(names)) < len(names):
        raise BatchError(f"renaming {old} to {new} would give two columns one name")
    return dict(zip(old, new, strict=True))


def _as_names(keys: Any, argument: str) -> list[str]:
    if keys is None:
        return []
    if isinstance(keys, str):
        return [keys]
    if isinstance(keys, list):
        return keys
    raise TypeError(f"{argument} is a name or a list of names, got {type(keys).__name__}")


def concat_arrays(parts: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The rows of all parts below each other; every part must have the same arrays."""
    pieces = list_of_dict_to_dict_of_list(parts)
    for key, arrays in pieces.items():
        widths = {array.shape[1:] for array in arrays}
        if len(widths) > 1:
            raise BatchError(f"cannot concatenate array {key!r}: shapes {sorted(widths)} per row")
    return {key: np.concatenate(arrays) for key, arrays in pieces.items()}


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


def common_rows(tensors: Mapping[str, Column]) -> list[int]:
    """The number of rows, which all columns must have in common, as a batch size."""
    rows = {key: _num_rows(key, tensor) for key, tensor in tensors.items()}
    if len(set(rows.values())) > 1:
        raise BatchError(f"all tensors must have equally many rows, got {rows}")
    return list(rows.values())[:1]


def _num_rows(key: str, tensor: Any) -> int:
    if not isinstance(tensor, Tensor | TensorDictBase):
        raise BatchError(f"tensors[{key!r}] must be a torch.Tensor, got {type(tensor).__name__}")
    if is_nested(tensor):
        open_jagged(tensor)  # refuses the layout that has no shape
    if not tensor.shape:
        raise BatchError(f"tensor {key!r} is a scalar; it needs a row per sample")
    return tensor.shape[0]


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


@dataclass(eq=False)
class DataProtoItem:
    """What `data[i]` gives: the same three fields as the batch, without the row dim.

    `meta_info` is the batch's own dictionary, not a copy.
    """

    # None when the batch has no tensors; typed for the many who know that it has.
    batch: TensorDict = None  # pyright: ignore[reportAssignmentType]
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


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


class _AutoPadding(type):
    """Makes `auto_padding` a property of the class itself."""

    _is_enabled = False

    @property
    def auto_padding(cls) -> bool:
        return cls._is_enabled or auto_padding_from_environment()

    @auto_padding.setter
    def auto_padding(cls, enabled: bool) -> None:
        if not isinstance(enabled, bool):
            raise BatchError(f"DataProtoConfig.auto_padding is True or False, got {enabled!r}")
        cls._is_enabled = enabled


class DataProtoConfig(metaclass=_AutoPadding):
    """Settings of all batches in this process; nothing is instantiated."""

    auto_padding_key = "_verl_auto_padding"
    """The `meta_info` key that switches padding on for one batch."""


Batch = TypeVar("Batch", bound="DataProto")


def fold_batch_dim(data: Batch, new_batch_size: int) -> Batch:
    """Gather consecutive rows, so that there are `new_batch_size` rows."""
    if new_batch_size < 1 or len(data) % new_batch_size:
        raise BatchError(f"{new_batch_size=} must divide the number of rows, {len(data)}")
    group = len(data) // new_batch_size
    return _reshape(data, new_batch_size, lambda shape: (new_batch_size, group, *shape[1:]))


def unfold_batch_dim(data: Batch, batch_dims: int = 2) -> Batch:
    """Merge the first `batch_dims` dims of every column into the row dim."""
    columns = [*(data.batch.values() if data.batch is not None else ())]
    columns += [*data.non_tensor_batch.values()]
    leading = {tuple(column.shape[:batch_dims]) for column in columns}
    if batch_dims < 1 or len(leading) > 1 or any(len(dims) < batch_dims for dims in leading):
        raise BatchError(f"all columns must share their first {batch_dims} dims, got {leading}")
    rows = int(np.prod(next(iter(leading), (len(data),))))
    return _reshape(data, rows, lambda shape: (rows, *shape[batch_dims:]))


def unfold_columns(data: Batch, n_split: int, split_keys: Collection[str]) -> Batch:
    """Cut dim 1 of the columns `split_keys` into `n_split` rows, and repeat the others."""
    known = {*(data.batch.keys() if data.batch is not None else ()), *data.non_tensor_batch}
    if not set(split_keys) <= known:
        raise BatchError(f"no column {sorted(set(split_keys) - known)}; there are {sorted(known)}")
    spread = data.repeat(n_split, interleave=True)
    for key in split_keys:
        columns: Any = data.non_tensor_batch if key in data.non_tensor_batch else data.batch
        column = columns[key]
        if isinstance(column, np.ndarray) and column.ndim == 1:
            column = _list_columns(key, column)
        if column.ndim < 2 or column.shape[1] % n_split:
            raise BatchError(
                f"dim 1 of {key!r} with shape {tuple(column.shape)} must divide by {n_split=}"
            )
        target: Any = spread.non_tensor_batch if key in data.non_tensor_batch else spread.batch
        shape = (len(spread), column.shape[1] // n_split, *column.shape[2:])
        target[key] = column.reshape(shape)
    return spread


def _list_columns(key: str, array: np.ndarray) -> np.ndarray:
    """(B,) rows that are lists of one length n, as a (B, n) object array."""
    lengths = {len(row) if isinstance(row, list | tuple | np.ndarray) else 0 for row in array}
    if len(lengths) != 1 or 0 in lengths:
        raise BatchError(f"the rows of {key!r} must be lists of equal length, got {lengths}")
    columns = np.empty((len(array), *lengths), dtype=object)
    for number, row in enumerate(array):
        columns[number] = object_array(row)
    return columns


def _reshape(
    data: Batch, num_rows: int, new_shape: Callable[[tuple[int, ...]], tuple[int, ...]]
) -> Batch:
    columns: dict[str, Any] = {}
    for key, column in data.batch.items() if data.batch is not None else ():
        if is_nested(column):
            raise BatchError(f"column {key!r} is jagged; only dense columns can be folded")
        columns[key] = column.reshape(new_shape(tuple(column.shape)))
    batch: Any = None if data.batch is None else TensorDict(columns, batch_size=[num_rows])
    arrays = {
        key: array.reshape(new_shape(array.shape)) for key, array in data.non_tensor_batch.items()
    }
    return type(data)(batch=batch, non_tensor_batch=arrays, meta_info=data.meta_info)

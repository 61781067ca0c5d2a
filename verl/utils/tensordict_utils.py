"""TensorDicts that also carry things which are not tensors (usually imported as `tu`).

Three kinds of entries: tensors, dense or jagged, with a row per sample; a `NonTensorStack`, one
Python object per sample; a `NonTensorData`, one value for the whole batch (a setting, a metric).
TensorDict's own operations disagree about the last two (a list of lists becomes a 2-D stack, a
selection costs a microsecond per entry and key) and do not cover jagged tensors in every version,
so rows are chosen, cut and joined here. `verl.protocol.DataProto` is the same three kinds of things
in three fields.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torch import Tensor

from verl.utils.tensor_rows import (
    BatchError,
    RowIndex,
    as_row_index,
    compact,
    concat_jagged,
    concat_rows,
    deep_equal,
    is_nested,
    iterate_minibatches,
    jagged,
    open_jagged,
    slice_rows,
    take_rows,
)

_MISSING = object()


# ---- build and read ------------------------------------------------------------------------------


def get_tensordict(
    tensor_dict: Mapping[str, Any], non_tensor_dict: Mapping[str, Any] | None = None
) -> TensorDict:
    """A batch of the columns in `tensor_dict` and the batch-wide values in `non_tensor_dict`.

    A column is a tensor, a contiguous jagged tensor, or a list with one object per sample.
    """
    columns = {name: _as_column(name, value) for name, value in tensor_dict.items()}
    rows = {name: len(column) for name, column in columns.items()}
    if len(set(rows.values())) > 1:
        raise BatchError(f"the columns of a batch must have equally many rows, got {rows}")
    clash = columns.keys() & (non_tensor_dict or {}).keys()
    if clash:
        raise BatchError(f"{sorted(clash)} cannot be both columns and batch-wide values")
    batch = TensorDict(columns, batch_size=list(rows.values())[:1])
    for name, value in (non_tensor_dict or {}).items():
        assign_non_tensor_data(batch, name, value)
    return batch


def _as_column(name: str, value: Any) -> Any:
    if isinstance(value, list):
        if any(isinstance(element, Tensor) for element in value):
            raise BatchError(
                f"column {name!r} is a list of tensors; stack them, or make them one jagged tensor "
                f"with torch.nested.as_nested_tensor(rows, layout=torch.jagged)"
            )
        return non_tensor_stack(value)
    if isinstance(value, NonTensorStack):
        return value
    if not isinstance(value, Tensor):
        raise BatchError(
            f"column {name!r} must be a tensor or a list of objects, got {type(value).__name__}"
        )
    if value.dim() == 0:
        raise BatchError(f"column {name!r} is a scalar; it needs a row per sample")
    if value.is_nested and not open_jagged(value).is_compact:
        raise BatchError(f"jagged column {name!r} must be contiguous; call .contiguous() first")
    return value


def non_tensor_stack(values: Sequence[Any]) -> NonTensorStack:
    """One entry per value, whatever the value is: a list stays one entry, not a further dim."""
    entries: list[Any] = [NonTensorData(v) if isinstance(v, list) else v for v in values]
    return NonTensorStack.from_list(entries)


def assign_non_tensor_data(tensor_dict: TensorDictBase, key: str, val: Any) -> None:
    """Store one value for the whole batch."""
    entry: Any = NonTensorData(unwrap_non_tensor_data(val))
    tensor_dict.set(key, entry)


def assign_non_tensor_stack(tensor_dict: TensorDictBase, key: str, val: list[Any]) -> None:
    """Store one object per sample."""
    if not isinstance(val, list):
        raise BatchError(
            f"{key!r} needs a list with one object per sample, got {type(val).__name__}"
        )
    rows = tensor_dict.batch_size[:1]
    if rows and len(val) != rows[0]:
        raise BatchError(f"{key!r} has {len(val)} objects for a batch of {rows[0]} samples")
    tensor_dict.set(key, non_tensor_stack(val))


def assign_non_tensor(tensor_dict: TensorDictBase, **kwargs: Any) -> TensorDictBase:
    """Store lists and stacks as one object per sample, and anything else as one value for the
    batch; returns the same batch."""
    for key, value in kwargs.items():
        if isinstance(value, list | NonTensorStack):
            assign_non_tensor_stack(tensor_dict, key, list(_plain(value)))
        else:
            assign_non_tensor_data(tensor_dict, key, value)
    return tensor_dict


def unwrap_non_tensor_data(data: Any) -> Any:
    return data.data if isinstance(data, NonTensorData) else data


def get_non_tensor_data(data: TensorDictBase, key: str, default: Any) -> Any:
    """A batch-wide value, or `default` when the key is missing."""
    return unwrap_non_tensor_data(data.get(key, default))


def get(tensordict: TensorDictBase, key: str, default: Any = None) -> Any:
    """The tensor, the list of objects, or the batch-wide value under `key`."""
    value = tensordict.get(key, _MISSING)
    return default if value is _MISSING else _plain(value)


def pop(tensordict: TensorDictBase, key: str, default: Any = None) -> Any:
    """Like `get`, and the key is gone afterwards."""
    value = tensordict.pop(key, _MISSING)
    return default if value is _MISSING else _plain(value)


def _plain(value: Any) -> Any:
    return (
        list(value.tolist()) if isinstance(value, NonTensorStack) else unwrap_non_tensor_data(value)
    )


def get_keys(tensordict: TensorDictBase, keys: Sequence[str]) -> TensorDict:
    """A new batch of some columns, which share their storage with the old one."""
    _check_present(tensordict, keys)
    return _with_rows({key: tensordict.get(key) for key in keys}, tensordict)


def pop_keys(tensordict: TensorDictBase, keys: Sequence[str]) -> TensorDict:
    """Move some columns into a new batch."""
    _check_present(tensordict, keys)
    return _with_rows({key: tensordict.pop(key) for key in keys}, tensordict)


def _check_present(tensordict: TensorDictBase, keys: Sequence[str]) -> None:
    present = set(tensordict.keys())
    missing = [key for key in keys if key not in present]
    if missing:
        raise KeyError(f"no column {missing} in the batch; there are {sorted(present)}")


# ---- choose and cut rows -------------------------------------------------------------------------


def index_select_tensor_dict(batch: TensorDictBase, indices: RowIndex) -> TensorDict:
    """The rows `indices` (numbers or a mask) of every column; batch-wide values stay."""
    index = as_row_index(indices, len(batch))
    tensors, stacks, shared = _by_kind(batch)
    columns: dict[str, Any] = dict(take_rows(tensors, index))
    rows = index.tolist()
    columns |= {
        name: non_tensor_stack([values[row] for row in rows]) for name, values in stacks.items()
    }
    return _in_order(columns | shared, batch, len(rows))


def _slice(batch: TensorDictBase, rows: range) -> TensorDict:
    tensors, stacks, shared = _by_kind(batch)
    columns: dict[str, Any] = dict(slice_rows(tensors, rows))
    columns |= {
        name: non_tensor_stack(values[rows.start : rows.stop]) for name, values in stacks.items()
    }
    return _in_order(columns | shared, batch, len(rows))


def chunk_tensordict(td: TensorDictBase, chunks: int) -> list[TensorDict]:
    """Cut into `chunks` batches of equal size."""
    if chunks < 1 or len(td) % chunks:
        raise BatchError(f"a batch of {len(td)} rows cannot be cut into {chunks} equal chunks")
    size = len(td) // chunks
    return [_slice(td, range(i * size, (i + 1) * size)) for i in range(chunks)]


def pad_to_divisor(data: TensorDictBase, size_divisor: int) -> tuple[TensorDictBase, int]:
    """Repeat rows from the start until `size_divisor` divides their number; returns how many."""
    if size_divisor < 1:
        raise BatchError(f"size_divisor must be at least 1, got {size_divisor}")
    pad_size = -len(data) % size_divisor
    if pad_size == 0:
        return data, 0
    return index_select_tensor_dict(data, np.arange(len(data) + pad_size) % len(data)), pad_size


def unpad(data: TensorDictBase, pad_size: int) -> TensorDictBase:
    """Drop the last `pad_size` rows."""
    if not 0 <= pad_size <= len(data):
        raise BatchError(f"cannot drop {pad_size} of {len(data)} rows")
    return data if pad_size == 0 else _slice(data, range(len(data) - pad_size))


def make_iterator(
    tensordict: TensorDictBase,
    mini_batch_size: int,
    epochs: int,
    seed: int | None = None,
    dataloader_kwargs: Mapping[str, Any] | None = None,
) -> Iterator[TensorDict]:
    """Mini-batches for `epochs` passes; see `verl.utils.tensor_rows.iterate_minibatches`."""
    return iterate_minibatches(
        lambda rows: index_select_tensor_dict(tensordict, rows),
        num_rows=len(tensordict),
        mini_batch_size=mini_batch_size,
        epochs=epochs,
        seed=seed,
        dataloader_kwargs=dataloader_kwargs,
    )


# ---- join ----------------------------------------------------------------------------------------


def concat_nested_tensors(tensors: Sequence[Tensor]) -> Tensor:
    """The rows of contiguous jagged tensors below each other."""
    for tensor in tensors:
        if not is_nested(tensor) or not open_jagged(tensor).is_compact:
            raise BatchError(f"only contiguous jagged tensors can be joined, got {tensor}")
    return concat_jagged(tensors, {})


def concat_tensordict(data: Sequence[TensorDictBase]) -> TensorDictBase:
    """The rows of all parts below each other; a batch-wide value is that of the first part."""
    if not data:
        raise BatchError("cannot concatenate an empty list of batches")
    if not data[0].batch_size:
        return concat_tensordict_with_none_bsz(data)
    kinds = [_by_kind(part) for part in data]
    names = [set(part.keys()) for part in data]
    if any(other != names[0] for other in names):
        raise BatchError(f"cannot concatenate batches with different keys: {names}")
    columns: dict[str, Any] = dict(concat_rows([tensors for tensors, _, _ in kinds]))
    for name in names[0] - columns.keys():
        columns[name] = _concat_objects([part.get(name) for part in data])
    return _in_order(columns, data[0], sum(len(part) for part in data))


def _concat_objects(entries: list[Any]) -> NonTensorStack | NonTensorData:
    if all(isinstance(entry, NonTensorData) for entry in entries):
        return NonTensorData(unwrap_non_tensor_data(entries[0]))
    return non_tensor_stack([row for entry in entries for row in _one_per_row(entry)])


def _one_per_row(entry: NonTensorStack | NonTensorData) -> list[Any]:
    if isinstance(entry, NonTensorStack):
        return entry.tolist()
    return [unwrap_non_tensor_data(entry)] * entry.batch_size[0]


def concat_tensordict_with_none_bsz(data: Sequence[TensorDictBase]) -> TensorDictBase:
    """Batches without a batch dim hold one value per rank; the first rank speaks for all."""
    for part in data:
        if part.batch_size:
            raise BatchError(f"expected batches without a batch dim, got {tuple(part.batch_size)}")
    return data[0]


def union_tensor_dict(tensor_dict1: TensorDictBase, tensor_dict2: TensorDictBase) -> TensorDictBase:
    """Add the columns of the second to the first; columns in both must hold the same values."""
    if tensor_dict1.batch_size != tensor_dict2.batch_size:
        raise BatchError(
            f"cannot unite batches of sizes {tuple(tensor_dict1.batch_size)} and "
            f"{tuple(tensor_dict2.batch_size)}"
        )
    present = set(tensor_dict1.keys())
    for key, value in tensor_dict2.items():
        if key in present and not _same_entry(tensor_dict1.get(key), value):
            raise BatchError(f"cannot unite batches: column {key!r} is in both and not equal")
    for key, value in tensor_dict2.items():
        if key not in present:
            tensor_dict1.set(key, value)
    return tensor_dict1


def _same_entry(one: Any, other: Any) -> bool:
    if isinstance(one, TensorDict) and isinstance(other, TensorDict):
        return deep_equal(dict(one.items()), dict(other.items()))
    if isinstance(one, Tensor) != isinstance(other, Tensor):
        return False
    return deep_equal(_plain(one), _plain(other))


def assert_tensordict_eq(tensordict1: TensorDictBase, tensordict2: TensorDictBase) -> None:
    """Raise an AssertionError that names the first difference between two batches."""
    keys = set(tensordict1.keys()), set(tensordict2.keys())
    if keys[0] != keys[1]:
        raise BatchError(f"different keys: {sorted(keys[0] ^ keys[1])} are in one batch only")
    if tensordict1.batch_size != tensordict2.batch_size:
        raise BatchError(f"different sizes: {tensordict1.batch_size} and {tensordict2.batch_size}")
    for key in sorted(keys[0]):
        one, other = tensordict1.get(key), tensordict2.get(key)
        if type(one) is not type(other):
            raise BatchError(
                f"{key!r} is {type(one).__name__} here and {type(other).__name__} there"
            )
        if isinstance(one, Tensor) and one.dtype != other.dtype:
            raise BatchError(f"{key!r} is {one.dtype} here and {other.dtype} there")
        if not _same_entry(one, other):
            raise BatchError(f"{key!r} differs: {_plain(one)} here, {_plain(other)} there")


# ---- memory layout -------------------------------------------------------------------------------


def contiguous(data: TensorDictBase) -> TensorDict:
    """The same batch with every tensor contiguous; those that were are not copied."""

    def packed(column: Any) -> Any:
        if isinstance(column, Tensor):
            return compact(column) if column.is_nested else column.contiguous()
        return contiguous(column) if isinstance(column, TensorDict) else column

    return _with_rows({name: packed(column) for name, column in data.items()}, data)


def maybe_fix_3d_position_ids(data: TensorDictBase) -> None:
    """Make jagged position ids of shape (B, 4, j) jagged in dim 2 again.

    A jagged tensor rebuilt from its buffer and offsets alone comes out jagged in dim 1; position
    ids with several rows per token (multimodal rotary embeddings) are jagged in dim 2.
    """
    ids = data.get("position_ids", None)
    if ids is None or not is_nested(ids) or ids.dim() != 3:
        return
    parts = open_jagged(ids)
    if parts.dim != 2:
        data.set("position_ids", jagged(parts.values, parts.offsets, 2))


# ---- the three kinds of entries ------------------------------------------------------------------


def _by_kind(batch: TensorDictBase) -> tuple[dict[str, Any], dict[str, list[Any]], dict[str, Any]]:
    """Tensors (and tables of them), one object per sample, one value per batch."""
    tensors: dict[str, Any] = {}
    stacks: dict[str, list[Any]] = {}
    shared: dict[str, Any] = {}
    for name, entry in batch.items():
        if isinstance(entry, NonTensorStack):
            stacks[name] = entry.tolist()
        elif isinstance(entry, NonTensorData):
            shared[name] = NonTensorData(entry.data)  # without a batch size, so that it fits any
        else:
            tensors[name] = entry
    return tensors, stacks, shared


def _in_order(columns: Mapping[str, Any], like: TensorDictBase, num_rows: int) -> TensorDict:
    ordered = {name: columns[name] for name, _ in like.items()}
    return TensorDict(ordered, batch_size=[num_rows], device=like.device)


def _with_rows(columns: Mapping[str, Any], like: TensorDictBase) -> TensorDict:
    return TensorDict(dict(columns), batch_size=like.batch_size, device=like.device)

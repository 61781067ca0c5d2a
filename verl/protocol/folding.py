"""Groups of rows: gathered into one row each, and spread out again.

fold_batch_dim     (B, ...)           -> (B / k, k, ...)     rows of a group side by side
unfold_batch_dim   (B / k, k, ...)    -> (B, ...)            the inverse
unfold_columns     (B, n * k) columns -> (B * n, k)          other columns are repeated n times
"""

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from tensordict import TensorDict

from verl.utils.tensor_rows import BatchError, is_nested

if TYPE_CHECKING:
    from verl.protocol.data_proto import DataProto

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
        if column.ndim < 2 or column.shape[1] % n_split:
            raise BatchError(
                f"dim 1 of {key!r} with shape {tuple(column.shape)} must divide by {n_split=}"
            )
        target: Any = spread.non_tensor_batch if key in data.non_tensor_batch else spread.batch
        shape = (len(spread), column.shape[1] // n_split, *column.shape[2:])
        target[key] = column.reshape(shape)
    return spread


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

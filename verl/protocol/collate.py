"""Rows put together to a batch again: the inverse of `data[i]`."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from verl.protocol.conversion import object_array
from verl.protocol.data_proto import DataProto
from verl.protocol.item import DataProtoItem
from verl.protocol.union import list_of_dict_to_dict_of_list
from verl.utils.tensor_rows import BatchError


def collate_fn(x: Sequence[DataProtoItem]) -> DataProto:
    """Stack rows; `meta_info` is left empty, for it belongs to the batch the rows come from."""
    if not x:
        raise BatchError("cannot make a batch of no rows")
    arrays = list_of_dict_to_dict_of_list([item.non_tensor_batch for item in x])
    batch: Any = None
    if x[0].batch is not None:
        columns = list_of_dict_to_dict_of_list([dict(item.batch.items()) for item in x])
        stacked = {key: _stack(key, values) for key, values in columns.items()}
        batch = TensorDict(stacked, batch_size=[len(x)])
    return DataProto(batch, {key: _as_array(values) for key, values in arrays.items()})


def _stack(key: str, rows: list[Tensor]) -> Tensor:
    shapes = {tuple(row.shape) for row in rows}
    if len(shapes) > 1:
        raise BatchError(
            f"the rows of {key!r} have different shapes, {sorted(shapes)}; choose rows of a jagged "
            f"column with data.select_idxs instead of one by one"
        )
    return torch.stack(rows)


def _as_array(values: list[Any]) -> np.ndarray:
    """NumPy scalars become an array of their own type again, anything else an array of objects."""
    if all(isinstance(value, np.generic) for value in values):
        return np.array(values)
    return object_array(values)

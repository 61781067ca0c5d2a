"""Rows added so that a batch divides, and taken away again."""

import numpy as np

from verl.protocol.data_proto import DataProto
from verl.utils.tensor_rows import BatchError


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Repeat rows from the start until `size_divisor` divides their number; returns how many.

    A batch that divides already, and an empty one, are returned as they are.
    """
    if size_divisor < 1:
        raise BatchError(f"size_divisor must be at least 1, got {size_divisor}")
    pad_size = -len(data) % size_divisor
    if pad_size == 0:
        return data, 0
    return data.select_idxs(np.arange(len(data) + pad_size) % len(data)), pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Drop the last `pad_size` rows."""
    if not 0 <= pad_size <= len(data):
        raise BatchError(f"cannot drop {pad_size} of {len(data)} rows")
    return data if pad_size == 0 else data.slice(0, len(data) - pad_size)

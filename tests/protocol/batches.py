"""Batches that many tests start from."""

import numpy as np
import torch

from verl.protocol import DataProto
from verl.protocol.ops import object_array


def numbered(num_rows: int = 4) -> DataProto:
    """Row i holds i, in a vector, in a matrix and as an object."""
    return DataProto.from_dict(
        tensors={
            "number": torch.arange(num_rows),
            "pair": torch.stack([torch.arange(num_rows), torch.arange(num_rows) + 0.5], dim=1),
        },
        non_tensors={
            "name": [f"row {i}" for i in range(num_rows)],
            "list": [[i] * i for i in range(num_rows)],
        },
        meta_info={"temperature": 0.7},
    )


def only_arrays(num_rows: int = 4) -> DataProto:
    return DataProto.from_dict(non_tensors={"name": object_array(range(num_rows))})


def only_tensors(num_rows: int = 4) -> DataProto:
    return DataProto.from_dict({"number": torch.arange(num_rows)})


def jagged_rows() -> DataProto:
    """Rows of 3, 2 and 4 tokens; `ids` and `mask` share offsets, `positions` is jagged in dim 2."""
    offsets = torch.tensor([0, 3, 5, 9])
    ids = torch.nested.nested_tensor_from_jagged(torch.arange(9), offsets)
    mask = torch.nested.nested_tensor_from_jagged(torch.arange(9) % 2, offsets)
    positions = torch.nested.nested_tensor_from_jagged(
        torch.arange(36).view(4, 9), offsets, jagged_dim=2
    )
    return DataProto.from_dict(
        {"ids": ids, "mask": mask, "positions": positions, "number": torch.arange(3)},
        {"name": ["a", "b", "c"]},
    )


def rows_of(tensor: torch.Tensor) -> list:
    return [row.tolist() for row in tensor.unbind()]


def numbers(data: DataProto) -> list[int]:
    """The row numbers of a `numbered` batch, after checking that its columns are still aligned."""
    found = data.batch["number"].tolist()
    if "pair" in data.batch:
        assert data.batch["pair"].tolist() == [[i, i + 0.5] for i in found]
    if "name" in data.non_tensor_batch:
        assert data.non_tensor_batch["name"].tolist() == [f"row {i}" for i in found]
    if "list" in data.non_tensor_batch:
        assert data.non_tensor_batch["list"].tolist() == [[i] * i for i in found]
    return found


def assert_same(left: DataProto, right: DataProto) -> None:
    """The same columns in the same order, with equal types, and equal meta_info."""
    assert (left.batch is None) == (right.batch is None)
    if left.batch is not None:
        assert left.batch.batch_size == right.batch.batch_size
        assert list(left.batch.keys()) == list(right.batch.keys())
        for key, column in left.batch.items():
            other = right.batch[key]
            assert column.dtype == other.dtype, key
            assert column.is_nested == other.is_nested, key
            if column.is_nested:
                assert rows_of(column) == rows_of(other), key
            else:
                assert column.shape == other.shape, key
                assert torch.equal(octets(column), octets(other)), key
    assert list(left.non_tensor_batch) == list(right.non_tensor_batch)
    for key, array in left.non_tensor_batch.items():
        assert array.dtype == right.non_tensor_batch[key].dtype, key
        assert array.shape == right.non_tensor_batch[key].shape, key
        assert repr(array.tolist()) == repr(right.non_tensor_batch[key].tolist()), key
    assert repr(left.meta_info) == repr(right.meta_info)


def octets(tensor: torch.Tensor) -> torch.Tensor:
    """Compares bit for bit: NaN equals NaN, and 0.0 differs from -0.0."""
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def object_rows(*values: object) -> np.ndarray:
    return object_array(values)

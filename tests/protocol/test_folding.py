"""Groups of rows gathered into one row each, and spread out again."""

import numpy as np
import pytest
import torch

from tests.protocol.batches import assert_same, jagged_rows, numbered, only_arrays
from verl.protocol import DataProto, fold_batch_dim, unfold_batch_dim


def test_fold_puts_consecutive_rows_side_by_side():
    data = numbered(6)
    folded = fold_batch_dim(data, new_batch_size=3)
    assert len(folded) == 3
    assert folded.batch["number"].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert folded.batch["pair"].shape == (3, 2, 2)
    assert folded.non_tensor_batch["name"].tolist()[1] == ["row 2", "row 3"]
    assert folded.meta_info is data.meta_info
    assert data.batch["number"].shape == (6,)


@pytest.mark.parametrize("new_batch_size", [1, 2, 3, 6])
def test_unfold_undoes_fold(new_batch_size):
    for data in (numbered(6), only_arrays(6)):
        assert_same(unfold_batch_dim(fold_batch_dim(data, new_batch_size), batch_dims=2), data)


def test_unfold_merges_any_number_of_dims():
    data = DataProto.from_dict({"x": torch.arange(24).view(2, 3, 4)}, {"y": np.zeros((2, 3, 4, 5))})
    rows = unfold_batch_dim(data, batch_dims=3)
    assert rows.batch["x"].tolist() == list(range(24))
    assert rows.non_tensor_batch["y"].shape == (24, 5)
    assert unfold_batch_dim(data, batch_dims=1).batch["x"].shape == (2, 3, 4)


def test_what_cannot_be_folded_is_refused():
    for size in (4, 0, -1):
        with pytest.raises(AssertionError, match="must divide the number of rows, 6"):
            fold_batch_dim(numbered(6), size)
    with pytest.raises(AssertionError, match="first 2 dims"):
        unfold_batch_dim(numbered(6))
    with pytest.raises(ValueError, match="'ids' is jagged"):
        fold_batch_dim(jagged_rows(), 1)

"""Rows chosen, cut, repeated and appended: tensors and arrays stay aligned."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tests.protocol.batches import jagged_rows, numbered, numbers, only_arrays, only_tensors
from verl.protocol import DataProto, DataProtoItem, collate_fn


class Recipe(DataProto):
    """A user's subclass."""


# ---- one row -------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [2, np.int64(2), np.int32(2), -2])
def test_an_integer_gives_one_row(index):
    data = numbered(4)
    item = data[index]
    assert isinstance(item, DataProtoItem)
    assert item.batch["number"].item() == 2
    assert item.batch["pair"].tolist() == [2.0, 2.5]
    assert item.batch.batch_size == ()
    assert item.non_tensor_batch == {"name": "row 2", "list": [2, 2]}
    assert item.meta_info is data.meta_info


def test_a_row_shares_its_tensors_with_the_batch():
    data = numbered(2)
    data[1].batch["pair"][0] = 9.0
    assert data.batch["pair"][1, 0] == 9.0


def test_a_row_of_a_batch_without_tensors_has_none():
    assert only_arrays(3)[1].batch is None
    assert only_arrays(3)[1].non_tensor_batch == {"name": 1}


def test_a_row_that_does_not_exist_is_an_index_error():
    for index in (4, -5):
        with pytest.raises(IndexError, match="4 rows"):
            numbered(4)[index]
        with pytest.raises(IndexError, match="4 rows"):
            only_arrays(4)[index]


def test_a_batch_can_be_looped_over():
    assert [item.non_tensor_batch["name"] for item in numbered(2)] == ["row 0", "row 1"]


@pytest.mark.parametrize("index", ["number", 1.5, None, (0, 1), {0}])
def test_other_indices_are_type_errors(index):
    with pytest.raises(TypeError, match=type(index).__name__):
        numbered(4)[index]


# ---- slices --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "window",
    [
        slice(None),
        slice(1, 3),
        slice(-2, None),
        slice(None, -1),
        slice(None, None, 2),
        slice(1, 100),
        slice(3, 1),
        slice(None, None, -1),
        slice(3, 0, -2),
    ],
)
def test_a_slice_means_what_it_means_for_a_list(window):
    data = numbered(5)
    part = data[window]
    assert numbers(part) == list(range(5))[window]
    assert part.meta_info is data.meta_info
    assert numbers(data.slice(window.start, window.stop, window.step)) == numbers(part)
    assert only_arrays(5)[window].non_tensor_batch["name"].tolist() == list(range(5))[window]


def test_a_slice_shares_the_storage():
    data = numbered(4)
    data[1:3].batch["number"][0] = 77
    assert data.batch["number"].tolist() == [0, 77, 2, 3]


def test_a_column_added_to_a_slice_is_not_in_the_batch():
    data = numbered(4)
    part = data[:]
    part.batch["new"] = torch.zeros(4)
    part.non_tensor_batch["new too"] = np.zeros(4)
    assert "new" not in data.batch
    assert "new too" not in data.non_tensor_batch


# ---- row numbers and masks -----------------------------------------------------------------------


@pytest.mark.parametrize("convert", [list, np.array, torch.tensor])
def test_rows_are_chosen_by_number_in_any_order_and_often(convert):
    data = numbered(4)
    chosen = data[convert([3, 0, 0, -1])]
    assert numbers(chosen) == [3, 0, 0, 3]
    assert chosen.meta_info is data.meta_info
    assert numbers(data.select_idxs(convert([1]))) == [1]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
def test_any_integer_type_chooses_rows(dtype):
    assert numbers(numbered(4).select_idxs(torch.tensor([2, 1], dtype=dtype))) == [2, 1]


@pytest.mark.parametrize("convert", [list, np.array, torch.tensor])
def test_rows_are_chosen_by_a_mask(convert):
    assert numbers(numbered(4)[convert([True, False, False, True])]) == [0, 3]
    assert len(numbered(4)[convert([False] * 4)]) == 0


@pytest.mark.parametrize(
    "nothing", [[], np.array([], dtype=int), torch.tensor([], dtype=torch.long)]
)
def test_no_rows_can_be_chosen(nothing):
    chosen = numbered(4)[nothing]
    assert len(chosen) == 0
    assert chosen.batch["pair"].shape == (0, 2)
    assert chosen.non_tensor_batch["name"].shape == (0,)


def test_a_mask_needs_an_entry_per_row():
    with pytest.raises(IndexError, match="3 for 4 rows"):
        numbered(4)[[True, False, True]]


def test_a_row_number_beyond_the_batch_is_an_index_error():
    for wrong in ([0, 4], [-5]):
        with pytest.raises(IndexError, match=f"row {wrong[-1]}"):
            numbered(4).select_idxs(wrong)
        with pytest.raises(IndexError, match=f"row {wrong[-1]}"):
            only_arrays(4).select_idxs(wrong)


def test_rows_are_not_chosen_by_fractions_or_tables():
    with pytest.raises(ValueError, match="float"):
        numbered(4).select_idxs(torch.tensor([0.0, 1.0]))
    with pytest.raises(ValueError, match=r"1-D.*\(1, 2\)"):
        numbered(4).select_idxs(torch.tensor([[0, 1]]))


def test_chosen_rows_are_copies():
    data = numbered(4)
    data.select_idxs([0, 1]).batch["number"][0] = 77
    assert numbers(data) == [0, 1, 2, 3]


def test_rows_of_array_only_and_tensor_only_batches_are_chosen():
    assert only_arrays(4).select_idxs([3, 1]).non_tensor_batch["name"].tolist() == [3, 1]
    assert only_tensors(4).select_idxs([3, 1]).batch["number"].tolist() == [3, 1]


def test_a_table_inside_a_column_follows_its_rows():
    inner = TensorDict({"x": torch.arange(3) * 10}, batch_size=[3])
    data = DataProto(TensorDict({"number": torch.arange(3), "inner": inner}, batch_size=[3]))
    assert data.select_idxs([2, 0]).batch["inner", "x"].tolist() == [20, 0]
    assert data.repeat(2).batch["inner", "x"].tolist() == [0, 0, 10, 10, 20, 20]
    assert DataProto.concat([data, data[:1]]).batch["inner", "x"].tolist() == [0, 10, 20, 0]
    assert data.chunk(3)[1].batch["inner", "x"].tolist() == [10]


# ---- reorder -------------------------------------------------------------------------------------


def test_reorder_changes_the_batch_itself():
    data = numbered(4)
    assert data.reorder(torch.tensor([3, 1, 0, 2])) is None
    assert numbers(data) == [3, 1, 0, 2]


def test_reordering_by_the_inverse_order_restores_the_batch():
    data, order = numbered(6), torch.tensor([3, 1, 5, 0, 2, 4])
    data.reorder(order)
    data.reorder(order.argsort())
    assert numbers(data) == [0, 1, 2, 3, 4, 5]


def test_reorder_leaves_the_original_tensors_alone():
    tensor = torch.arange(3)
    DataProto.from_dict({"number": tensor}).reorder(torch.tensor([2, 1, 0]))
    assert tensor.tolist() == [0, 1, 2]


# ---- repeat --------------------------------------------------------------------------------------


def test_repeat_is_interleaved_unless_told_otherwise():
    data = numbered(3)
    assert numbers(data.repeat()) == [0, 0, 1, 1, 2, 2]
    assert numbers(data.repeat(repeat_times=2, interleave=True)) == [0, 0, 1, 1, 2, 2]
    assert numbers(data.repeat(repeat_times=2, interleave=False)) == [0, 1, 2, 0, 1, 2]
    assert data.repeat(3).meta_info is data.meta_info


@pytest.mark.parametrize("interleave", [True, False])
def test_repeat_works_without_tensors_and_without_arrays(interleave):
    order = [0, 0, 1, 1] if interleave else [0, 1, 0, 1]
    assert only_arrays(2).repeat(2, interleave).non_tensor_batch["name"].tolist() == order
    assert only_tensors(2).repeat(2, interleave).batch["number"].tolist() == order


@pytest.mark.parametrize("interleave", [True, False])
def test_repeat_copies_even_when_once(interleave):
    data = numbered(2)
    data.repeat(1, interleave).batch["number"][0] = 77
    assert numbers(data) == [0, 1]


def test_repeating_no_times_leaves_no_rows():
    assert len(numbered(3).repeat(0)) == 0
    with pytest.raises(ValueError, match="-1"):
        numbered(3).repeat(-1)


def test_arrays_with_several_dims_are_repeated_by_row():
    data = DataProto.from_dict(non_tensors={"x": np.arange(4).reshape(2, 2)})
    assert data.repeat(2).non_tensor_batch["x"].tolist() == [[0, 1], [0, 1], [2, 3], [2, 3]]
    plain = data.repeat(2, interleave=False).non_tensor_batch["x"]
    assert plain.tolist() == [[0, 1], [2, 3], [0, 1], [2, 3]]


@pytest.mark.parametrize("convert", [list, tuple, np.array, torch.tensor])
def test_each_row_is_repeated_as_often_as_its_count_says(convert):
    data = numbered(4).sample_level_repeat(convert([3, 1, 0, 2]))
    assert numbers(data) == [0, 0, 0, 1, 3, 3]


def test_counts_must_be_one_per_row_and_not_negative():
    assert len(only_arrays(0).sample_level_repeat([])) == 0
    for counts in ([1, 2], [[1, 1, 1, 1]], [1, 1, 1, -1], [1.0, 1.5, 1.0, 1.0]):
        with pytest.raises(AssertionError, match="each of the 4 rows"):
            numbered(4).sample_level_repeat(counts)


# ---- unfold_column_chunks ------------------------------------------------------------------------


def test_split_columns_become_rows_and_other_columns_are_repeated():
    data = DataProto.from_dict(
        {"group": torch.arange(8).view(2, 4), "label": torch.tensor([10, 20])},
        {"name": ["a", "b"], "grid": np.arange(4).reshape(2, 2)},
    )
    rows = data.unfold_column_chunks(2, split_keys=["group", "grid"])
    assert rows.batch["group"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert rows.batch["label"].tolist() == [10, 10, 20, 20]
    assert rows.non_tensor_batch["name"].tolist() == ["a", "a", "b", "b"]
    assert rows.non_tensor_batch["grid"].tolist() == [[0], [1], [2], [3]]
    assert data.batch["group"].shape == (2, 4)


def test_without_split_columns_all_are_repeated():
    assert numbers(numbered(2).unfold_column_chunks(2)) == [0, 0, 1, 1]


def test_columns_that_cannot_be_split_are_named():
    data = DataProto.from_dict({"group": torch.zeros(2, 3), "label": torch.zeros(2)})
    for key in ("group", "label", "missing"):
        with pytest.raises(ValueError, match=key):
            data.unfold_column_chunks(2, split_keys=[key])


# ---- padding -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("candidate", "rows"), [("", [0, 1, 2, 2]), ("last", [0, 1, 2, 2]), ("first", [0, 1, 2, 0])]
)
def test_padding_appends_copies_of_a_row_to_the_batch_itself(candidate, rows):
    data = numbered(3)
    assert data.padding(1, candidate) is None
    assert numbers(data) == rows


def test_padding_by_nothing_changes_nothing():
    data = numbered(3)
    data.padding(0)
    assert numbers(data) == [0, 1, 2]


def test_padding_needs_a_row_to_copy_and_a_sensible_request():
    with pytest.raises(IndexError, match="0 rows"):
        only_arrays(0).padding(1)
    with pytest.raises(ValueError, match="middle"):
        numbered(3).padding(1, "middle")
    with pytest.raises(ValueError, match="-1"):
        numbered(3).padding(-1)


# ---- collate -------------------------------------------------------------------------------------


def test_rows_are_put_together_again():
    data = numbered(4)
    assert numbers(collate_fn([data[2], data[0]])) == [2, 0]
    assert collate_fn([data[2]]).meta_info == {}


def test_numbers_keep_their_type_when_rows_are_put_together():
    data = DataProto.from_dict(non_tensors={"x": np.array([1, 2], dtype=np.int16), "y": [1, [2]]})
    again = collate_fn([data[0], data[1]])
    assert again.batch is None
    assert again.non_tensor_batch["x"].dtype == np.int16
    assert again.non_tensor_batch["y"].tolist() == [1, [2]]


def test_rows_of_different_shapes_are_not_put_together_silently():
    data = jagged_rows()
    with pytest.raises(ValueError, match=r"'ids'.*select_idxs"):
        collate_fn([data[0], data[1]])
    with pytest.raises(ValueError, match="no rows"):
        collate_fn([])


# ---- class ---------------------------------------------------------------------------------------


def test_operations_stay_in_the_class_of_the_batch():
    data = Recipe.from_dict({"number": torch.arange(4)}, {"name": list("abcd")})
    results = [
        data[1:2],
        data[[0]],
        data.repeat(2),
        data.sample_level_repeat([1, 1, 1, 1]),
        data.unfold_column_chunks(2),
        data.select(),
        data.chunk(2)[0],
        data.split(3)[1],
        next(data.make_iterator(2, 1)),
        Recipe.concat([data, numbered(2).select(["number"], ["name"], [])]),
        data.pop(["number"]),
    ]
    assert [type(result) for result in results] == [Recipe] * len(results)

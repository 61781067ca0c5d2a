"""Columns chosen, moved out, renamed and united."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tests.protocol.batches import numbered, numbers, object_rows, only_arrays, only_tensors
from verl.protocol import (
    DataProto,
    list_of_dict_to_dict_of_list,
    union_numpy_dict,
    union_tensor_dict,
)

# ---- select --------------------------------------------------------------------------------------


def test_select_keeps_everything_by_default():
    data = numbered(3)
    chosen = data.select()
    assert numbers(chosen) == [0, 1, 2]
    assert list(chosen.batch.keys()) == ["number", "pair"]
    assert list(chosen.non_tensor_batch) == ["name", "list"]
    assert chosen.meta_info is data.meta_info


def test_select_keeps_the_named_columns():
    data = numbered(3)
    data.meta_info["other"] = 1
    chosen = data.select(["pair"], ["name"], ["other"])
    assert list(chosen.batch.keys()) == ["pair"]
    assert list(chosen.non_tensor_batch) == ["name"]
    assert chosen.meta_info == {"other": 1}
    assert list(data.batch.keys()) == ["number", "pair"]


def test_selecting_no_columns_keeps_the_number_of_rows():
    chosen = numbered(3).select([], [], [])
    assert len(chosen) == 3
    assert list(chosen.batch.keys()) == []


def test_a_missing_tensor_is_an_error_and_other_missing_keys_are_ignored():
    with pytest.raises(KeyError, match="missing"):
        numbered(3).select(["missing"])
    with pytest.raises(KeyError, match="missing"):
        only_arrays(3).select(["missing"])
    chosen = numbered(3).select(None, ["missing"], ["missing"])
    assert chosen.non_tensor_batch == {}
    assert chosen.meta_info == {}


def test_select_shares_the_tensors_but_not_the_table():
    data = numbered(3)
    chosen = data.select(["number"])
    chosen.batch["number"][0] = 77
    chosen.batch["new"] = torch.zeros(3)
    assert data.batch["number"].tolist() == [77, 1, 2]
    assert list(data.batch.keys()) == ["number", "pair"]
    everything = data.select()
    everything.batch["new"] = torch.zeros(3)
    assert list(data.batch.keys()) == ["number", "pair"]


def test_deepcopy_copies_arrays_and_meta_info_but_not_tensors():
    data = numbered(3)
    data.meta_info["list"] = [1]
    copied = data.select(deepcopy=True)
    copied.non_tensor_batch["list"][1].append("more")
    copied.meta_info["list"].append(2)
    copied.batch["number"][0] = 77
    assert data.non_tensor_batch["list"][1] == [1]
    assert data.meta_info["list"] == [1]
    assert data.batch["number"][0] == 77


def test_select_works_without_tensors_or_arrays():
    assert only_arrays(2).select().batch is None
    assert only_arrays(2).select([], ["name"]).non_tensor_batch["name"].tolist() == [0, 1]
    assert only_tensors(2).select(["number"], ["x"]).non_tensor_batch == {}


# ---- pop -----------------------------------------------------------------------------------------


def test_pop_moves_columns_into_a_new_batch():
    data = numbered(3)
    popped = data.pop(["pair"], ["list"], ["temperature"])
    assert list(popped.batch.keys()) == ["pair"]
    assert popped.non_tensor_batch["list"].tolist() == [[], [1], [2, 2]]
    assert popped.meta_info == {"temperature": 0.7}
    assert list(data.batch.keys()) == ["number"]
    assert list(data.non_tensor_batch) == ["name"]
    assert data.meta_info == {}


def test_pop_moves_nothing_unless_named():
    data = numbered(3)
    popped = data.pop()
    assert len(popped) == 0
    assert popped.batch is None
    assert popped.meta_info == {}
    assert numbers(data) == [0, 1, 2]


def test_a_batch_keeps_its_rows_when_all_tensors_are_popped():
    data = only_tensors(3)
    data.pop(["number"])
    assert len(data) == 3


@pytest.mark.parametrize("place", [0, 1, 2])
def test_popping_a_missing_key_is_an_assertion_error_and_changes_nothing(place):
    data = numbered(3)
    keys = [["number"], ["name"], ["temperature"]]
    keys[place] = ["missing"]
    with pytest.raises(AssertionError, match="missing"):
        data.pop(*keys)
    assert numbers(data) == [0, 1, 2]
    assert data.meta_info == {"temperature": 0.7}
    with pytest.raises(AssertionError, match="missing"):
        only_arrays(2).pop(["missing"])


# ---- rename --------------------------------------------------------------------------------------


def test_rename_changes_the_batch_itself():
    data = numbered(2)
    tensor = data.batch["number"]
    assert data.rename("number", "index") is data
    assert set(data.batch.keys()) == {"index", "pair"}
    assert data.batch["index"] is tensor


def test_rename_takes_lists_and_can_swap():
    data = numbered(2)
    data.rename(["number", "pair"], ["pair", "number"])
    assert data.batch["pair"].tolist() == [0, 1]
    assert data.rename() is data


def test_rename_explains_what_it_cannot_do():
    with pytest.raises(TypeError, match=r"old_keys.*tuple"):
        numbered(2).rename(("number",), "x")
    with pytest.raises(TypeError, match=r"new_keys.*int"):
        numbered(2).rename("number", 3)
    with pytest.raises(ValueError, match="2 columns to 1 names"):
        numbered(2).rename(["number", "pair"], ["x"])
    with pytest.raises(ValueError, match="missing"):
        numbered(2).rename("missing", "x")
    with pytest.raises(ValueError, match="one name"):
        numbered(2).rename("number", "pair")


# ---- union of batches ----------------------------------------------------------------------------


def test_union_adds_to_the_batch_itself():
    data = numbered(2)
    other = DataProto.from_dict({"new": torch.ones(2)}, {"label": ["x", "y"]}, {"steps": 3})
    assert data.union(other) is data
    assert set(data.batch.keys()) == {"number", "pair", "new"}
    assert data.non_tensor_batch["label"].tolist() == ["x", "y"]
    assert data.meta_info == {"temperature": 0.7, "steps": 3}
    assert set(other.batch.keys()) == {"new"}


def test_union_puts_metrics_together():
    data = DataProto.from_dict({"x": torch.ones(2)}, meta_info={"metrics": {"a": 1, "b": 2}})
    other = DataProto.from_dict({"y": torch.ones(2)}, meta_info={"metrics": {"b": 3, "c": 4}})
    assert data.union(other).meta_info == {"metrics": {"a": 1, "b": 3, "c": 4}}


def test_union_leaves_meta_info_of_batches_that_share_it_alone():
    data = numbered(4)
    part = data[:2]
    part.union(DataProto.from_dict({"new": torch.ones(2)}, meta_info={"steps": 3}))
    assert data.meta_info == {"temperature": 0.7}


def test_what_both_have_may_be_equal():
    data = numbered(3)
    data.union(numbered(3))
    assert numbers(data) == [0, 1, 2]


@pytest.mark.parametrize(
    "other",
    [
        DataProto.from_dict({"new": torch.ones(2), "number": torch.tensor([0, 9])}),
        DataProto.from_dict({"new": torch.ones(2), "number": torch.tensor([0.0, 1.5])}),
        DataProto.from_dict({"new": torch.ones(2), "number": torch.zeros(2, 1).long()}),
        DataProto.from_dict({"new": torch.ones(2)}, {"name": ["row 0", "other"]}),
        DataProto.from_dict({"new": torch.ones(2)}, meta_info={"temperature": 1.0}),
        DataProto.from_dict({"new": torch.ones(3)}),
        DataProto.from_dict(non_tensors={"new": [1, 2, 3]}),
    ],
)
def test_a_conflict_is_an_error_and_changes_nothing(other):
    data = numbered(2)
    with pytest.raises(AssertionError, match="cannot unite"):
        data.union(other)
    assert numbers(data) == [0, 1]
    assert set(data.batch.keys()) == {"number", "pair"}
    assert data.meta_info == {"temperature": 0.7}


def test_tensors_and_arrays_of_different_batches_are_united():
    data = only_arrays(2).union(only_tensors(2))
    assert data.batch["number"].tolist() == [0, 1]
    assert data.non_tensor_batch["name"].tolist() == [0, 1]
    assert only_tensors(2).union(only_arrays(2)).non_tensor_batch["name"].tolist() == [0, 1]


def test_a_batch_of_nothing_but_meta_info_can_be_united():
    assert numbered(2).union(DataProto(meta_info={"x": 1})).meta_info == {
        "temperature": 0.7,
        "x": 1,
    }
    data = DataProto(meta_info={"x": 1}).union(numbered(2))
    assert numbers(data) == [0, 1]


def test_meta_info_with_arrays_and_nan_can_be_equal():
    one = DataProto(meta_info={"a": np.array([1.0, np.nan]), "t": torch.ones(2), "n": float("nan")})
    one.union(
        DataProto(meta_info={"a": np.array([1.0, np.nan]), "t": torch.ones(2), "n": float("nan")})
    )
    with pytest.raises(AssertionError, match="'t'"):
        one.union(DataProto(meta_info={"t": torch.zeros(2)}))


# ---- the functions below it ----------------------------------------------------------------------


def test_union_of_tensordicts_changes_and_returns_the_first():
    one = TensorDict({"a": torch.ones(2)}, batch_size=[2])
    other = TensorDict({"a": torch.ones(2), "b": torch.zeros(2)}, batch_size=[2])
    assert union_tensor_dict(one, other) is one
    assert set(one.keys()) == {"a", "b"}


def test_nan_in_a_tensor_is_a_conflict_and_in_an_array_it_is_not():
    nan = TensorDict({"a": torch.tensor([float("nan")])}, batch_size=[1])
    with pytest.raises(AssertionError, match="'a'"):
        union_tensor_dict(nan, nan.clone())
    array = {"a": np.array([np.nan])}
    assert union_numpy_dict(array, {"a": np.array([np.nan])}) is array


def test_union_of_tensordicts_needs_one_batch_size():
    with pytest.raises(AssertionError, match=r"\(2,\) and \(3,\)"):
        union_tensor_dict(TensorDict({}, batch_size=[2]), TensorDict({}, batch_size=[3]))


def test_equal_object_arrays_unite():
    rows = (None, [1, float("nan")], {"a": (1, np.array([np.nan, 2.0]))}, "x", torch.ones(2))
    again = (None, [1, float("nan")], {"a": (1, np.array([np.nan, 2.0]))}, "x", torch.ones(2))
    assert len(union_numpy_dict({"x": object_rows(*rows)}, {"x": object_rows(*again)})) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([1, 2], [1, 3]),
        ([1, 2], [1, 2, 3]),
        ([1, 2], (1, 2)),
        ({"a": 1}, {"a": 2}),
        ({"a": 1}, {"b": 1}),
        ({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}]}),
        (None, 0),
        ("1", 1),
        ([1], np.array([1])),
        (np.array([1, 2]), np.array([1, 3])),
        (np.array([1, 2]), np.array([[1, 2]])),
        (float("nan"), 1.0),
        (torch.ones(1), torch.zeros(1)),
        (torch.ones(1), 1.0),
        (object_rows([1]), object_rows([2])),
        (object_rows(1), [1]),
        ({"a": 1}, [1]),
    ],
)
def test_different_objects_are_a_conflict_both_ways(one, other):
    with pytest.raises(AssertionError, match="'x'"):
        union_numpy_dict({"x": object_rows(one)}, {"x": object_rows(other)})
    with pytest.raises(AssertionError, match="'x'"):
        union_numpy_dict({"x": object_rows(other)}, {"x": object_rows(one)})


def test_objects_that_contain_themselves_can_be_compared():
    def loop(end: int) -> list:
        knot: list = [end]
        knot.append({"back": knot})
        return knot

    one = {"x": object_rows(loop(1))}
    assert len(union_numpy_dict(one, {"x": object_rows(loop(1))})) == 1
    with pytest.raises(AssertionError, match="'x'"):
        union_numpy_dict(one, {"x": object_rows(loop(2))})


def test_objects_nested_beyond_the_recursion_limit_can_be_compared():
    def nest(core: int) -> list:
        value: list = [core]
        for _ in range(20_000):
            value = [value]
        return value

    assert len(union_numpy_dict({"x": object_rows(nest(1))}, {"x": object_rows(nest(1))})) == 1
    with pytest.raises(AssertionError, match="'x'"):
        union_numpy_dict({"x": object_rows(nest(1))}, {"x": object_rows(nest(2))})


def test_union_of_arrays_wants_arrays():
    with pytest.raises(AssertionError, match=r"'x'.*list"):
        union_numpy_dict({}, {"x": [1]})


def test_a_list_of_dictionaries_becomes_a_dictionary_of_lists():
    assert list_of_dict_to_dict_of_list([{"a": 1, "b": 2}, {"b": 4, "a": 3}]) == {
        "a": [1, 3],
        "b": [2, 4],
    }
    assert list_of_dict_to_dict_of_list([]) == {}
    for wrong in ({"a": 1}, {"a": 1, "b": 2, "c": 3}):
        with pytest.raises(AssertionError, match="number 1"):
            list_of_dict_to_dict_of_list([{"a": 1, "b": 2}, wrong])

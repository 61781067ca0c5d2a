"""What code written for this interface relies on: batches, columns and groups."""

import pickle

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from verl.protocol import (
    DataProto,
    deserialize_tensordict,
    serialize_tensordict,
    union_numpy_dict,
)
from verl.utils import tensordict_utils as tu
from verl.utils.groupwise import as_torch_index, group_mean_std
from verl.utils.torch_functional import expand_as_nested


def jagged(*lengths):
    rows = [torch.ones(length) for length in lengths]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def test_a_key_of_two_meanings_is_an_assertion_error_that_names_it():
    first, second = {"x": np.array([1])}, {"x": np.array([2])}
    text = "`x` in tensor_dict1 and tensor_dict2 are not the same object"
    with pytest.raises(AssertionError, match=text):
        union_numpy_dict(first, second)


@pytest.mark.parametrize("num_batch_dims", [2, 3])
def test_a_batch_has_one_batch_dimension(num_batch_dims):
    tensors = {"obs": torch.zeros(100, 10), "act": torch.zeros(100, 10, 3)}
    assert len(DataProto.from_dict(tensors, num_batch_dims=1)) == 100
    with pytest.raises(AssertionError, match="num_batch_dims"):
        DataProto.from_dict(tensors, num_batch_dims=num_batch_dims)


def test_a_batch_may_be_made_of_meta_info_alone():
    batch = DataProto(batch=None, non_tensor_batch=None, meta_info={"step": 3})
    assert (len(batch), batch.non_tensor_batch, batch.meta_info) == (0, {}, {"step": 3})


def test_rows_of_lists_unfold_into_one_element_each():
    labels = np.empty(2, dtype=object)
    labels[:] = [["a1", "a2"], ["b1", "b2"]]
    batch = DataProto.from_dict(
        {"id": torch.tensor([[1], [2]])}, non_tensors={"labels": labels, "uid": ["x", "y"]}
    )
    unfolded = batch.unfold_column_chunks(2, split_keys=["labels"])
    assert unfolded.non_tensor_batch["labels"].shape == (4, 1)
    assert unfolded.non_tensor_batch["labels"].tolist() == [["a1"], ["a2"], ["b1"], ["b2"]]
    assert unfolded.non_tensor_batch["uid"].tolist() == ["x", "x", "y", "y"]
    assert unfolded.batch["id"][:, 0].tolist() == [1, 1, 2, 2]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_of_the_strided_layout_travel():
    parts = [torch.arange(6.0).view(2, 3), torch.arange(12.0).view(3, 4)]
    nested = torch.nested.as_nested_tensor(parts)
    table = TensorDict({"x": nested}, batch_size=[2])
    batch = DataProto(batch=table)
    for found in (
        deserialize_tensordict(serialize_tensordict(table))["x"],
        pickle.loads(pickle.dumps(batch)).batch["x"],
    ):
        assert (found.layout, found.dtype) == (torch.strided, torch.float32)
        assert [one.tolist() for one in found.unbind()] == [one.tolist() for one in parts]


def test_assigning_gives_the_same_batch_back():
    table = TensorDict({"x": torch.zeros(3)}, batch_size=[3])
    assert tu.assign_non_tensor(table, top_p=0.8) is table
    assert table["top_p"] == 0.8


def test_wrapped_values_are_stored_as_they_are():
    table = TensorDict({"x": torch.zeros(3)}, batch_size=[3])
    tu.assign_non_tensor(
        table, one=NonTensorData(0.3), each=NonTensorStack.from_list([1.0, 2.0, 3.0])
    )
    assert table["one"] == 0.3
    assert table["each"] == [1.0, 2.0, 3.0]
    with pytest.raises(RuntimeError, match="'each' has 2 objects for a batch of 3"):
        tu.assign_non_tensor(table, each=NonTensorStack.from_list([1.0, 2.0]))


def test_a_batch_wide_value_that_differs_is_that_of_the_first_part():
    parts = []
    for temperature in (1.0, 2.0):
        table = TensorDict({"x": torch.zeros(2)}, batch_size=[2])
        parts.append(tu.assign_non_tensor(table, temp=temperature, name=["a", "b"]))
    joined = tu.concat_tensordict(parts)
    assert joined["temp"] == 1.0
    assert joined["name"] == ["a", "b", "a", "b"]
    assert [part["temp"] for part in parts] == [1.0, 2.0]


def test_one_value_per_row_is_repeated_over_its_tokens():
    expanded = expand_as_nested(torch.tensor([1, 2, 3]), jagged(2, 3, 4))
    assert expanded.values().tolist() == [1, 1, 2, 2, 2, 3, 3, 3, 3]


@pytest.mark.parametrize(
    ("tensor", "nested"),
    [
        (torch.tensor([1, 2, 3]), torch.zeros(3, 2)),
        (torch.tensor([1, 2]), jagged(2, 3, 4)),
        (torch.tensor([[1, 2, 3]]), jagged(2, 3, 4)),
        (torch.tensor([1, 2, 3]), jagged(2, 3, 4).unsqueeze(-1)),
    ],
)
def test_what_cannot_be_repeated_is_an_assertion_error(tensor, nested):
    with pytest.raises(AssertionError):
        expand_as_nested(tensor, nested)


def test_labels_that_are_nearly_integers_are_rounded():
    groups = as_torch_index([1.0000001, 2.0, 1.0, 3.0000000001])
    assert groups[0] == groups[2]
    assert len(set(groups.tolist())) == 3


def test_the_sizes_of_groups_are_floats():
    _, _, count = group_mean_std(torch.tensor([1.0, 3.0, 5.0]), torch.tensor([0, 0, 1]))
    assert count.dtype.is_floating_point
    assert count.tolist() == [2.0, 1.0]

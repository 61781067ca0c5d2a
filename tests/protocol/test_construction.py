"""How a batch is made, and what makes it consistent."""

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, lazy_legacy

import verl
from tests.protocol.batches import assert_same, numbered, only_arrays, only_tensors
from verl.protocol import BatchError, DataProto, DataProtoConfig


def test_the_class_is_exported_at_the_top():
    assert verl.DataProto is DataProto


def test_importing_the_protocol_switches_lazy_tensordicts_off():
    assert lazy_legacy() is False


def test_an_empty_batch_has_no_rows():
    data = DataProto()
    assert len(data) == 0
    assert data.batch is None
    assert data.non_tensor_batch == {}
    assert data.meta_info == {}


def test_the_length_is_that_of_the_tensors_else_of_the_first_array():
    assert len(only_tensors(5)) == 5
    assert len(only_arrays(3)) == 3
    assert len(DataProto(TensorDict({}, batch_size=[7]))) == 7
    assert len(DataProto(meta_info={"a": 1})) == 0


def test_a_batch_has_exactly_one_row_dim():
    with pytest.raises(AssertionError, match="exactly one row dim"):
        DataProto(TensorDict({"a": torch.zeros(2, 3)}, batch_size=[2, 3]))
    with pytest.raises(AssertionError, match="exactly one row dim"):
        DataProto(TensorDict({"a": torch.zeros(2)}, batch_size=[]))


def test_every_array_has_as_many_rows_as_the_batch():
    tensors = TensorDict({"a": torch.zeros(2)}, batch_size=[2])
    with pytest.raises(AssertionError, match=r"'x'.*\(3,\).*2 rows"):
        DataProto(tensors, {"x": np.zeros(3)})
    with pytest.raises(AssertionError, match="'y'"):
        DataProto(None, {"x": np.zeros(3), "y": np.zeros(2)})
    with pytest.raises(AssertionError, match="'x'"):
        DataProto(None, {"x": np.array(1.0)})


def test_a_list_is_not_an_array():
    with pytest.raises(AssertionError, match=r"'x'.*np.ndarray, got list"):
        DataProto(None, {"x": [1, 2]})


def test_what_does_not_fit_is_a_value_error_and_an_assertion_error():
    with pytest.raises(ValueError, match="'x'"):
        DataProto(None, {"x": [1, 2]})
    assert issubclass(BatchError, AssertionError)


def test_consistency_can_be_checked_again_after_a_change():
    data = numbered(4)
    data.non_tensor_batch["short"] = np.zeros(3)
    with pytest.raises(AssertionError, match="'short'"):
        data.check_consistency()


# ---- from_dict -----------------------------------------------------------------------------------


def test_lists_become_object_arrays_in_the_dictionary_that_was_passed():
    non_tensors = {"x": ["a", "b"]}
    data = DataProto.from_dict({"t": torch.zeros(2)}, non_tensors)
    assert non_tensors["x"].dtype == object
    assert data.non_tensor_batch["x"] is non_tensors["x"]


def test_each_row_of_an_object_array_is_one_object_even_if_lists_are_equally_long():
    values = [[1, 2], [3, 4]]
    data = DataProto.from_dict(non_tensors={"x": values})
    assert data.non_tensor_batch["x"].shape == (2,)
    assert data.non_tensor_batch["x"][0] is values[0]


def test_rows_may_be_lists_of_different_lengths_dictionaries_arrays_and_none():
    values = [[1], [2, 3], {"a": 1}, None, np.zeros(2), torch.ones(1), "text"]
    data = DataProto.from_dict(non_tensors={"x": values})
    assert all(
        kept is given for kept, given in zip(data.non_tensor_batch["x"], values, strict=True)
    )


def test_arrays_stay_what_they_are():
    array = np.arange(6.0).reshape(2, 3)
    assert DataProto.from_dict(non_tensors={"x": array}).non_tensor_batch["x"] is array


def test_one_value_for_all_rows_belongs_into_meta_info():
    for value in ("text", {"a": 1}, 3):
        with pytest.raises(ValueError, match="meta_info"):
            DataProto.from_dict(non_tensors={"x": value})


def test_without_tensors_there_is_no_tensordict():
    assert DataProto.from_dict(tensors={}).batch is None
    assert DataProto.from_dict().batch is None
    assert DataProto.from_dict(non_tensors={"x": [1]}).batch is None


def test_all_tensors_share_their_first_dim():
    with pytest.raises(AssertionError, match=r"'a': 2.*'b': 3"):
        DataProto.from_dict({"a": torch.zeros(2), "b": torch.zeros(3)})


def test_a_tensor_column_must_be_a_tensor():
    with pytest.raises(ValueError, match=r"'a'.*torch.Tensor, got ndarray"):
        DataProto.from_dict({"a": np.zeros(2)})


def test_the_tensors_may_come_as_a_tensordict():
    source = TensorDict({"a": torch.arange(2)}, batch_size=[2])
    data = DataProto.from_dict(source)
    data.batch["b"] = torch.zeros(2)
    assert list(source.keys()) == ["a"]


def test_tensors_are_not_copied():
    tensor = torch.zeros(2)
    assert DataProto.from_dict({"a": tensor}).batch["a"].data_ptr() == tensor.data_ptr()


def test_auto_padding_is_noted_in_meta_info():
    data = DataProto.from_dict({"a": torch.zeros(2)}, auto_padding=True)
    assert data.meta_info == {DataProtoConfig.auto_padding_key: True}
    assert DataProtoConfig.auto_padding_key == "_verl_auto_padding"
    assert DataProto.from_dict({"a": torch.zeros(2)}).meta_info == {}


def test_two_batches_never_share_a_default_dictionary():
    one, other = DataProto.from_dict({"a": torch.zeros(1)}), DataProto()
    one.meta_info["x"] = 1
    one.non_tensor_batch["y"] = np.zeros(1)
    assert other.meta_info == {}
    assert DataProto.from_dict({"a": torch.zeros(1)}).non_tensor_batch == {}


# ---- from_single_dict ----------------------------------------------------------------------------


def test_a_single_dictionary_is_sorted_by_type():
    data = DataProto.from_single_dict(
        {"t": torch.arange(2), "x": np.array(["a", "b"], dtype=object)}, {"m": 1}, auto_padding=True
    )
    assert list(data.batch.keys()) == ["t"]
    assert list(data.non_tensor_batch) == ["x"]
    assert data.meta_info == {"m": 1, "_verl_auto_padding": True}


def test_a_single_dictionary_holds_tensors_and_arrays_only():
    with pytest.raises(ValueError, match=r"'x'.*got list"):
        DataProto.from_single_dict({"x": [1, 2]})


# ---- TensorDict ----------------------------------------------------------------------------------


def test_a_tensordict_is_taken_apart_by_the_kind_of_entry():
    source = TensorDict(
        {
            "t": torch.arange(2),
            "objects": NonTensorStack(NonTensorData([1]), NonTensorData([2])),
            "setting": NonTensorData({"k": 1}),
        },
        batch_size=[2],
    )
    data = DataProto.from_tensordict(source, meta_info={"more": 2})
    assert list(data.batch.keys()) == ["t"]
    assert data.non_tensor_batch["objects"].tolist() == [[1], [2]]
    assert data.meta_info == {"more": 2, "setting": {"k": 1}}


def test_meta_info_may_not_contradict_the_tensordict():
    source = TensorDict({"m": NonTensorData(1)}, batch_size=[])
    assert DataProto.from_tensordict(source, meta_info={"m": 1}).meta_info == {"m": 1}
    with pytest.raises(ValueError, match="'m'"):
        DataProto.from_tensordict(source, meta_info={"m": 2})


def test_no_tensordict_is_an_empty_batch():
    assert_same(DataProto.from_tensordict(), DataProto())


@pytest.mark.parametrize("data", [numbered(3), only_arrays(3), only_tensors(3), DataProto()])
def test_a_batch_survives_the_way_through_a_tensordict(data):
    assert_same(DataProto.from_tensordict(data.to_tensordict()), data)


def test_objects_of_every_kind_survive_the_way_through_a_tensordict():
    values = [None, [1, 2], [3], {}, (1,), torch.ones(2), np.zeros(2), "text"]
    data = DataProto.from_dict({"t": torch.zeros(8)}, {"x": values}, {"m": [1, [2]], "n": None})
    back = DataProto.from_tensordict(data.to_tensordict())
    assert all(
        kept is given for kept, given in zip(back.non_tensor_batch["x"], values, strict=True)
    )
    assert back.meta_info == {"m": [1, [2]], "n": None}


def test_meta_info_only_survives_the_way_through_a_tensordict():
    data = DataProto(meta_info={"m": 1})
    assert data.to_tensordict().batch_size == ()
    assert DataProto.from_tensordict(data.to_tensordict()).meta_info == {"m": 1}


@pytest.mark.parametrize(
    "fields",
    [
        {"tensors": {"k": torch.zeros(2)}, "non_tensors": {"k": [1, 2]}},
        {"tensors": {"k": torch.zeros(2)}, "meta_info": {"k": 1}},
        {"non_tensors": {"k": [1, 2]}, "meta_info": {"k": 1}},
    ],
)
def test_one_name_cannot_be_two_entries_of_a_tensordict(fields):
    with pytest.raises(AssertionError, match="k"):
        DataProto.from_dict(**fields).to_tensordict()


def test_to_moves_the_tensors_of_the_batch_itself():
    data = numbered(2)
    assert data.to("meta") is data
    assert data.batch["number"].device.type == "meta"
    assert DataProto().to("cpu").batch is None


# ---- description ---------------------------------------------------------------------------------


def test_the_description_names_shape_type_and_device_of_every_column():
    assert numbered(4).get_data_info().splitlines() == [
        "batch",
        "  number: (4,) (torch.int64) cpu",
        "  pair: (4, 2) (torch.float32) cpu",
        "non_tensor_batch",
        "  name: (4,) (object)",
        "  list: (4,) (object)",
        "meta_info",
        "  temperature: float",
    ]


def test_the_size_is_printed_in_gigabytes(capsys):
    data = DataProto.from_dict({"t": torch.zeros(1024, 1024)}, {"x": np.zeros(1024)})
    data.print_size("here")
    data.print_size()
    size = f"Size of tensordict: {4 / 1024} GB, size of non_tensor_batch: {8 / 1024**2} GB\n"
    assert capsys.readouterr().out == f"here, {size}{size}"

"""Batches cut into parts, joined again, and walked over in mini-batches."""

import numpy as np
import pytest
import torch

from tests.protocol.batches import assert_same, numbered, numbers, only_arrays, only_tensors
from verl.protocol import DataProto, DataProtoConfig, pad_dataproto_to_divisor, unpad_dataproto


@pytest.fixture
def _auto_padding():
    DataProtoConfig.auto_padding = True
    yield
    DataProtoConfig.auto_padding = False


# ---- chunk ---------------------------------------------------------------------------------------


def test_chunks_are_equal_consecutive_and_share_storage_and_meta_info():
    data = numbered(6)
    chunks = data.chunk(3)
    assert [numbers(chunk) for chunk in chunks] == [[0, 1], [2, 3], [4, 5]]
    assert all(chunk.meta_info is data.meta_info for chunk in chunks)
    chunks[1].batch["number"][0] = 77
    assert data.batch["number"][2] == 77


@pytest.mark.parametrize("make", [numbered, only_arrays, only_tensors])
@pytest.mark.parametrize("chunks", [4, 0, -1, 11])
def test_a_batch_that_does_not_divide_is_not_cut(make, chunks):
    with pytest.raises(AssertionError, match=f"10 rows cannot be cut into {chunks} equal chunks"):
        make(10).chunk(chunks)


def test_with_auto_padding_tensors_are_cut_by_the_rule_of_torch_chunk_and_arrays_follow():
    data = numbered(10)
    data.meta_info[DataProtoConfig.auto_padding_key] = True
    assert [numbers(chunk) for chunk in data.chunk(4)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]


def test_with_auto_padding_arrays_alone_are_cut_by_the_rule_of_array_split():
    data = only_arrays(10)
    data.meta_info[DataProtoConfig.auto_padding_key] = True
    assert [len(chunk) for chunk in data.chunk(4)] == [3, 3, 2, 2]
    names = [name for chunk in data.chunk(4) for name in chunk.non_tensor_batch["name"]]
    assert names == list(range(10))


def test_there_are_as_many_chunks_as_asked_for_even_if_some_are_empty():
    data = numbered(5)
    data.meta_info[DataProtoConfig.auto_padding_key] = True
    assert [numbers(chunk) for chunk in data.chunk(4)] == [[0, 1], [2, 3], [4], []]
    assert [len(chunk) for chunk in data.chunk(7)] == [1, 1, 1, 1, 1, 0, 0]


def test_no_rows_make_empty_chunks():
    assert [len(chunk) for chunk in numbered(0).chunk(3)] == [0, 0, 0]
    assert [len(chunk) for chunk in only_arrays(0).chunk(3)] == [0, 0, 0]
    assert [len(chunk) for chunk in DataProto().chunk(3)] == [0, 0, 0]


def test_a_batch_without_columns_is_cut_by_its_rows():
    assert [len(chunk) for chunk in numbered(4).select([], []).chunk(2)] == [2, 2]


# ---- who enables auto-padding --------------------------------------------------------------------


def test_padding_is_off_by_default_and_on_for_one_batch_by_its_own_flag():
    assert not numbered(2).is_padding_enabled()
    assert not DataProto(meta_info={"_verl_auto_padding": False}).is_padding_enabled()
    assert DataProto.from_dict(non_tensors={"x": [1]}, auto_padding=True).is_padding_enabled()


@pytest.mark.usefixtures("_auto_padding")
def test_padding_is_on_for_all_batches_by_the_class_property():
    assert DataProtoConfig.auto_padding is True
    assert numbered(2).is_padding_enabled()
    assert [len(chunk) for chunk in numbered(3).chunk(2)] == [2, 1]


@pytest.mark.parametrize(
    ("value", "is_on"), [("TRUE", True), ("1", True), ("true", True), ("0", False)]
)
def test_padding_is_on_by_the_environment(monkeypatch, value, is_on):
    monkeypatch.setenv("VERL_AUTO_PADDING", value)
    assert DataProtoConfig.auto_padding is is_on
    assert numbered(2).is_padding_enabled() is is_on


@pytest.mark.parametrize("value", [1, "True", None])
def test_the_class_property_is_true_or_false(value):
    with pytest.raises(AssertionError, match="True or False"):
        DataProtoConfig.auto_padding = value
    assert DataProtoConfig.auto_padding is False


# ---- split ---------------------------------------------------------------------------------------


def test_split_cuts_parts_of_a_size_and_the_last_may_be_short():
    data = numbered(5)
    assert [numbers(part) for part in data.split(2)] == [[0, 1], [2, 3], [4]]
    assert [numbers(part) for part in data.split(9)] == [[0, 1, 2, 3, 4]]
    assert data.split(2)[0].meta_info is data.meta_info
    assert [len(part) for part in only_arrays(3).split(2)] == [2, 1]
    assert numbered(0).split(2) == []
    with pytest.raises(ValueError, match="at least 1"):
        data.split(0)


# ---- concat --------------------------------------------------------------------------------------


def test_concat_joins_the_rows_in_order():
    data = numbered(5)
    assert_same(DataProto.concat([data[:2], data[2:4], data[4:]]), data)
    assert_same(DataProto.concat([data]), data)


def test_concat_copies():
    data = numbered(2)
    DataProto.concat([data]).batch["number"][0] = 77
    assert numbers(data) == [0, 1]


def test_concat_works_without_tensors_or_without_arrays():
    whole = DataProto.concat([only_arrays(2), only_arrays(1)])
    assert whole.batch is None
    assert whole.non_tensor_batch["name"].tolist() == [0, 1, 0]
    assert DataProto.concat([only_tensors(2), only_tensors(1)]).batch["number"].tolist() == [
        0,
        1,
        0,
    ]


def test_empty_parts_may_be_joined():
    assert numbers(DataProto.concat([numbered(0), numbered(2), numbered(0)])) == [0, 1]
    assert len(DataProto.concat([DataProto(), DataProto()])) == 0


def test_other_meta_info_must_agree_and_is_united():
    one = DataProto.from_dict(
        {"a": torch.zeros(1)}, meta_info={"x": 1, "array": np.array([1.0, np.nan])}
    )
    other = DataProto.from_dict(
        {"a": torch.zeros(1)}, meta_info={"y": 2, "array": np.array([1.0, np.nan])}
    )
    merged = DataProto.concat([one, other]).meta_info
    assert (merged["x"], merged["y"], list(merged)) == (1, 2, ["x", "array", "y"])
    assert one.meta_info.keys() == {"x", "array"}
    other.meta_info["x"] = 3
    with pytest.raises(AssertionError, match="Conflicting values for meta_info key 'x'"):
        DataProto.concat([one, other])


def test_metrics_of_the_parts_become_a_dictionary_of_lists():
    def part(metrics: object) -> DataProto:
        return DataProto.from_dict({"a": torch.zeros(1)}, meta_info={"metrics": metrics})

    joined = DataProto.concat([part({"loss": 1.0, "kl": 2.0}), part({"loss": 3.0, "kl": 4.0})])
    assert joined.meta_info == {"metrics": {"loss": [1.0, 3.0], "kl": [2.0, 4.0]}}
    joined = DataProto.concat(
        [part([{"loss": 1.0}, {"loss": 2.0}]), part(None), part({"loss": 3.0})]
    )
    assert joined.meta_info == {"metrics": {"loss": [1.0, 2.0, 3.0]}}
    assert DataProto.concat([part(None), part(None)]).meta_info == {}
    with pytest.raises(AssertionError, match="same keys"):
        DataProto.concat([part({"loss": 1.0}), part({"kl": 1.0})])


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], "empty list"),
        ([only_arrays(1), only_tensors(1)], "with tensors and batches without"),
        ([numbered(1), numbered(1).select(["number"])], r"part 1 has \['number'\]"),
        ([numbered(1), numbered(1).select(None, ["name"])], r"number 1 has \['name'\]"),
        (
            [DataProto.from_dict({"a": torch.zeros(1, w)}) for w in (2, 3)],
            r"'a'.*\[\(2,\), \(3,\)\].*pad",
        ),
        ([DataProto.from_dict(non_tensors={"a": np.zeros((1, w))}) for w in (2, 3)], "'a'"),
    ],
)
def test_parts_that_cannot_be_joined_say_why(parts, message):
    with pytest.raises(AssertionError, match=message):
        DataProto.concat(parts)


def test_object_columns_stay_objects_when_joined():
    data = DataProto.from_dict(non_tensors={"x": [[1, 2], [3, 4]]})
    joined = DataProto.concat([data, data])
    assert joined.non_tensor_batch["x"].shape == (4,)
    assert joined.non_tensor_batch["x"][3] == [3, 4]


# ---- mini-batches --------------------------------------------------------------------------------


def test_mini_batches_come_in_order_for_every_epoch():
    data = numbered(6)
    batches = list(data.make_iterator(mini_batch_size=2, epochs=2))
    assert [numbers(batch) for batch in batches] == [[0, 1], [2, 3], [4, 5]] * 2
    assert all(batch.meta_info is data.meta_info for batch in batches)


def test_a_seed_makes_shuffled_epochs_repeatable_and_epochs_differ():
    data, shuffle = numbered(64), {"shuffle": True}

    def order(seed: int) -> list[list[int]]:
        return [numbers(b) for b in data.make_iterator(8, 3, seed=seed, dataloader_kwargs=shuffle)]

    assert order(1) == order(1)
    assert order(1) != order(2)
    epochs = [order(1)[i : i + 8] for i in (0, 8, 16)]
    assert epochs[0] != epochs[1]
    for epoch in epochs:
        assert sorted(row for batch in epoch for row in batch) == list(range(64))


def test_the_shuffled_order_is_that_of_a_torch_dataloader():
    loader = torch.utils.data.DataLoader(
        list(range(12)), 4, shuffle=True, generator=torch.Generator().manual_seed(5)
    )
    expected = [rows.tolist() for _ in range(2) for rows in loader]
    batches = numbered(12).make_iterator(4, 2, seed=5, dataloader_kwargs={"shuffle": True})
    assert [numbers(batch) for batch in batches] == expected


def test_a_seed_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    list(numbered(4).make_iterator(2, 1, seed=0, dataloader_kwargs={"shuffle": True}))
    assert torch.equal(torch.get_rng_state(), before)


def test_mini_batches_of_arrays_alone_keep_their_type():
    data = DataProto.from_dict(non_tensors={"x": np.arange(4, dtype=np.int16), "y": [[1]] * 4})
    batch = next(data.make_iterator(2, 1))
    assert batch.non_tensor_batch["x"].dtype == np.int16
    assert batch.non_tensor_batch["y"].tolist() == [[1], [1]]


def test_a_sampler_decides_which_rows_come():
    batches = numbered(4).make_iterator(2, 1, dataloader_kwargs={"sampler": [3, 1, 2, 0]})
    assert [numbers(batch) for batch in batches] == [[3, 1], [2, 0]]


@pytest.mark.parametrize(
    ("size", "hint"), [(5, "4 and 6"), (7, "6 and 12"), (24, "12"), (0, "1"), (-3, "1")]
)
def test_a_mini_batch_that_does_not_divide_is_refused_at_once_with_the_nearest_choices(size, hint):
    with pytest.raises(AssertionError, match=rf"\({size}\).*12 rows.*choices are {hint}$"):
        numbered(12).make_iterator(size, 1)


def test_no_rows_give_no_mini_batches():
    assert list(numbered(0).make_iterator(2, 3)) == []


# ---- pad to a divisor ----------------------------------------------------------------------------


def test_padding_reuses_rows_from_the_start():
    padded, pad_size = pad_dataproto_to_divisor(numbered(5), 4)
    assert pad_size == 3
    assert numbers(padded) == [0, 1, 2, 3, 4, 0, 1, 2]


def test_padding_reuses_rows_repeatedly_if_needed():
    padded, pad_size = pad_dataproto_to_divisor(numbered(2), 7)
    assert pad_size == 5
    assert numbers(padded) == [0, 1, 0, 1, 0, 1, 0]


def test_a_batch_that_divides_is_returned_as_it_is():
    for data in (numbered(4), numbered(0), only_arrays(4), DataProto()):
        padded, pad_size = pad_dataproto_to_divisor(data, 2)
        assert padded is data
        assert pad_size == 0


def test_padding_leaves_meta_info_alone():
    data = numbered(3)
    data.meta_info["metrics"] = {"loss": 1.0}
    padded, _ = pad_dataproto_to_divisor(data, 2)
    assert padded.meta_info == {"temperature": 0.7, "metrics": {"loss": 1.0}}


def test_unpadding_drops_rows_at_the_end():
    data = numbered(4)
    assert numbers(unpad_dataproto(data, 3)) == [0]
    assert unpad_dataproto(data, 0) is data
    assert len(unpad_dataproto(data, 4)) == 0


def test_impossible_paddings_are_refused():
    with pytest.raises(ValueError, match="size_divisor"):
        pad_dataproto_to_divisor(numbered(2), 0)
    for pad_size in (-1, 3):
        with pytest.raises(ValueError, match=f"{pad_size} of 2 rows"):
            unpad_dataproto(numbered(2), pad_size)

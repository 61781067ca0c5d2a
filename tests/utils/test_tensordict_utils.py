"""TensorDicts with tensors, one object per sample, and one value per batch."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack, TensorDict

from verl.utils import tensordict_utils as tu

OFFSETS = torch.tensor([0, 3, 5, 9, 10])
IDS = [[0, 1, 2], [3, 4], [5, 6, 7, 8], [9]]


def table() -> TensorDict:
    """Four rows of each kind of entry."""
    return tu.get_tensordict(
        {
            "number": torch.arange(4),
            "ids": torch.nested.nested_tensor_from_jagged(torch.arange(10), OFFSETS),
            "mask": torch.nested.nested_tensor_from_jagged(torch.arange(10) % 2, OFFSETS),
            "positions": torch.nested.nested_tensor_from_jagged(
                torch.arange(40).view(4, 10), OFFSETS, jagged_dim=2
            ),
            "chat": [[0], [1, 1], {"turn": 2}, None],
        },
        {"temperature": 0.7, "labels": ["x", "y"]},
    )


CHAT = [[0], [1, 1], {"turn": 2}, None]


def rows_of(tensor: torch.Tensor) -> list:
    return [row.tolist() for row in tensor.unbind()]


def check(data: TensorDict, rows: list[int]) -> None:
    """All entries hold these rows of `table`."""
    assert data.batch_size == (len(rows),)
    assert data["number"].tolist() == rows
    assert rows_of(data["ids"]) == [IDS[row] for row in rows]
    assert rows_of(data["positions"]) == [
        [[10 * k + i for i in IDS[row]] for k in range(4)] for row in rows
    ]
    assert rows_of(data["ids"] * data["mask"]) == [[i * (i % 2) for i in IDS[row]] for row in rows]
    assert tu.get(data, "chat") == [CHAT[row] for row in rows]
    assert tu.get(data, "temperature") == 0.7
    assert tu.get(data, "labels") == ["x", "y"]


# ---- build ---------------------------------------------------------------------------------------


def test_a_table_holds_three_kinds_of_entries():
    data = table()
    check(data, [0, 1, 2, 3])
    assert isinstance(data.get("chat"), NonTensorStack)
    assert isinstance(data.get("temperature"), NonTensorData)


def test_a_table_without_columns_has_no_batch_dim():
    data = tu.get_tensordict({}, {"x": 1})
    assert data.batch_size == ()
    assert tu.get(data, "x") == 1


def test_a_stack_is_accepted_as_a_column():
    stack = NonTensorStack(NonTensorData([1]), NonTensorData([2]))
    assert tu.get(tu.get_tensordict({"x": stack}), "x") == [[1], [2]]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"a": torch.zeros(2), "b": torch.zeros(3)}, r"\{'a': 2, 'b': 3\}"),
        ({"a": torch.zeros(2), "b": ["x"]}, r"\{'a': 2, 'b': 1\}"),
        ({"a": [torch.zeros(2), torch.zeros(3)]}, r"list of tensors.*jagged"),
        ({"a": np.zeros(2)}, "got ndarray"),
        ({"a": torch.tensor(1.0)}, "scalar"),
        (
            {
                "a": torch.nested.nested_tensor_from_jagged(
                    torch.arange(10), OFFSETS, OFFSETS.diff() - 1
                )
            },
            "contiguous",
        ),
    ],
)
def test_columns_that_do_not_fit_are_named(columns, message):
    with pytest.raises(AssertionError, match=message):
        tu.get_tensordict(columns)


def test_a_name_is_a_column_or_a_value_for_the_batch():
    with pytest.raises(AssertionError, match="'a'"):
        tu.get_tensordict({"a": torch.zeros(2)}, {"a": 1})


def test_lists_become_one_object_per_sample_and_other_values_one_per_batch():
    data = TensorDict({"a": torch.zeros(2)}, batch_size=[2])
    tu.assign_non_tensor(data, per_row=["x", ["y"]], per_batch={"k": [1]})
    assert isinstance(data.get("per_row"), NonTensorStack)
    assert tu.get(data, "per_row") == ["x", ["y"]]
    assert tu.get(data, "per_batch") == {"k": [1]}
    tu.assign_non_tensor_data(data, "list", [1, 2, 3])
    assert tu.get(data, "list") == [1, 2, 3]


def test_equal_lists_stay_one_object_per_sample():
    data = TensorDict({"a": torch.zeros(2)}, batch_size=[2])
    tu.assign_non_tensor_stack(data, "x", [[1, 2], [1, 2]])
    assert data.get("x").batch_size == (2,)
    assert tu.get(data, "x") == [[1, 2], [1, 2]]


def test_a_stack_needs_a_list_with_one_object_per_sample():
    data = TensorDict({"a": torch.zeros(2)}, batch_size=[2])
    with pytest.raises(ValueError, match="3 objects for a batch of 2"):
        tu.assign_non_tensor_stack(data, "x", [1, 2, 3])
    with pytest.raises(ValueError, match="got tuple"):
        tu.assign_non_tensor_stack(data, "x", (1, 2))


# ---- read ----------------------------------------------------------------------------------------


def test_get_gives_plain_values_and_a_default():
    data = table()
    assert tu.get(data, "number") is data["number"]
    assert type(tu.get(data, "chat")) is list
    assert tu.get(data, "missing") is None
    assert tu.get(data, "missing", 3) == 3
    assert tu.get_non_tensor_data(data, "temperature", None) == 0.7
    assert tu.get_non_tensor_data(data, "missing", 3) == 3


def test_a_wrapped_value_is_unwrapped_once():
    assert tu.unwrap_non_tensor_data(NonTensorData([1])) == [1]
    assert tu.unwrap_non_tensor_data("x") == "x"
    data = TensorDict({}, batch_size=[2])
    tu.assign_non_tensor_data(data, "x", NonTensorData(1))
    assert tu.get(data, "x") == 1


def test_pop_gives_and_removes():
    data = table()
    assert tu.pop(data, "temperature") == 0.7
    assert tu.pop(data, "chat") == CHAT
    assert tu.pop(data, "number").tolist() == [0, 1, 2, 3]
    assert tu.pop(data, "number", "gone") == "gone"
    assert tu.pop(data, "number") is None
    assert set(data.keys()) == {"ids", "mask", "positions", "labels"}


def test_keys_are_chosen_or_moved_into_a_new_table():
    data = table()
    chosen = tu.get_keys(data, ["number", "temperature"])
    assert set(chosen.keys()) == {"number", "temperature"}
    assert chosen.batch_size == (4,)
    chosen["number"][0] = 77
    assert data["number"][0] == 77
    moved = tu.pop_keys(data, ["number", "chat"])
    assert tu.get(moved, "chat") == CHAT
    assert set(data.keys()) == {"ids", "mask", "positions", "temperature", "labels"}


def test_missing_keys_are_key_errors_and_nothing_is_moved():
    data = table()
    for take in (tu.get_keys, tu.pop_keys):
        with pytest.raises(KeyError, match="missing"):
            take(data, ["number", "missing"])
    check(data, [0, 1, 2, 3])


# ---- rows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("convert", [list, np.array, torch.tensor])
def test_rows_are_chosen_by_number_or_mask(convert):
    check(tu.index_select_tensor_dict(table(), convert([2, 0, 2, -1])), [2, 0, 2, 3])
    check(tu.index_select_tensor_dict(table(), convert([True, False, False, True])), [0, 3])
    with pytest.raises(IndexError, match="row 4"):
        tu.index_select_tensor_dict(table(), convert([4]))


@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_a_table_is_cut_into_equal_chunks_and_joined_again(chunks):
    parts = tu.chunk_tensordict(table(), chunks)
    size = 4 // chunks
    for number, part in enumerate(parts):
        check(part, list(range(number * size, (number + 1) * size)))
    check(tu.concat_tensordict(parts), [0, 1, 2, 3])


@pytest.mark.parametrize("chunks", [3, 0, 5])
def test_a_table_that_does_not_divide_is_not_cut(chunks):
    with pytest.raises(AssertionError, match=f"4 rows cannot be cut into {chunks}"):
        tu.chunk_tensordict(table(), chunks)


def test_padding_reuses_rows_from_the_start_and_is_undone():
    padded, pad_size = tu.pad_to_divisor(table(), 3)
    assert pad_size == 2
    check(padded, [0, 1, 2, 3, 0, 1])
    check(tu.unpad(padded, pad_size), [0, 1, 2, 3])
    padded, pad_size = tu.pad_to_divisor(table(), 11)
    check(padded, [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2])
    same = table()
    assert tu.pad_to_divisor(same, 2) == (same, 0)
    assert tu.unpad(same, 0) is same
    with pytest.raises(ValueError, match="size_divisor"):
        tu.pad_to_divisor(same, 0)
    with pytest.raises(ValueError, match="5 of 4 rows"):
        tu.unpad(same, 5)


def test_mini_batches_repeat_with_the_seed():
    data = table()
    for number, batch in enumerate(tu.make_iterator(data, 2, 2)):
        check(batch, [0, 1] if number % 2 == 0 else [2, 3])

    def order(seed: int) -> list[list[int]]:
        batches = tu.make_iterator(data, 1, 4, seed=seed, dataloader_kwargs={"shuffle": True})
        return [batch["number"].tolist() for batch in batches]

    assert order(3) == order(3)
    assert order(3) != order(4)
    with pytest.raises(AssertionError, match="choices are 2 and 4"):
        tu.make_iterator(data, 3, 1)


# ---- join ----------------------------------------------------------------------------------------


def test_jagged_tensors_are_joined():
    one = torch.nested.as_nested_tensor([torch.arange(2), torch.arange(1)], layout=torch.jagged)
    other = torch.nested.as_nested_tensor([torch.arange(3)], layout=torch.jagged)
    assert rows_of(tu.concat_nested_tensors([one, other])) == [[0, 1], [0], [0, 1, 2]]
    for wrong in (
        torch.zeros(2, 2),
        torch.nested.nested_tensor_from_jagged(torch.arange(10), OFFSETS, OFFSETS.diff() - 1),
    ):
        with pytest.raises(AssertionError, match="contiguous jagged"):
            tu.concat_nested_tensors([one, wrong])


def test_a_value_of_the_batch_is_that_of_the_first_part():
    one = tu.get_tensordict({"a": torch.zeros(2)}, {"rank": 0, "same": [1]})
    other = tu.get_tensordict({"a": torch.zeros(1)}, {"rank": 1, "same": [1]})
    joined = tu.concat_tensordict([one, other])
    assert tu.get(joined, "rank") == 0
    assert isinstance(joined.get("rank"), NonTensorData)
    assert tu.get(joined, "same") == [1]
    assert isinstance(joined.get("same"), NonTensorData)


def test_tables_with_different_keys_are_not_joined():
    with pytest.raises(AssertionError, match="different keys"):
        tu.concat_tensordict([table(), tu.get_keys(table(), ["number"])])
    jagged = tu.get_keys(table(), ["ids"])
    dense = tu.get_tensordict({"ids": torch.zeros(1, 4)})
    with pytest.raises(AssertionError, match="some parts are jagged"):
        tu.concat_tensordict([jagged, dense])
    with pytest.raises(AssertionError, match="empty list"):
        tu.concat_tensordict([])


def test_of_tables_without_a_batch_dim_the_first_is_taken():
    first, second = tu.get_tensordict({}, {"x": 1}), tu.get_tensordict({}, {"x": 2})
    assert tu.concat_tensordict([first, second]) is first
    assert tu.concat_tensordict_with_none_bsz([first, second]) is first
    with pytest.raises(AssertionError, match="without a batch dim"):
        tu.concat_tensordict_with_none_bsz([first, table()])


def test_union_adds_to_the_first_and_refuses_conflicts():
    data = table()
    extra = tu.get_tensordict({"new": torch.ones(4), "chat": list(CHAT)}, {"temperature": 0.7})
    assert tu.union_tensor_dict(data, extra) is data
    check(data, [0, 1, 2, 3])
    assert data["new"].tolist() == [1, 1, 1, 1]
    for conflict in (
        tu.get_tensordict({"later": torch.ones(4), "number": torch.zeros(4).long()}),
        tu.get_tensordict({"later": torch.ones(4), "chat": [1, 2, 3, 4]}),
        tu.get_tensordict({"later": torch.ones(4)}, {"temperature": 1.0}),
        tu.get_tensordict({"later": torch.ones(4), "number": ["0", "1", "2", "3"]}),
    ):
        with pytest.raises(AssertionError, match="in both and not equal"):
            tu.union_tensor_dict(data, conflict)
    assert "later" not in data
    with pytest.raises(AssertionError, match=r"\(4,\) and \(3,\)"):
        tu.union_tensor_dict(data, tu.get_tensordict({"x": torch.ones(3)}))


def test_tables_inside_tables_are_compared_and_joined():
    def nested(value: float) -> TensorDict:
        deep = TensorDict({"x": torch.full((2,), value)}, batch_size=[2])
        inner = TensorDict({"deep": deep}, batch_size=[2])
        return TensorDict({"inner": inner}, batch_size=[2])

    tu.assert_tensordict_eq(nested(1.0), nested(1.0))
    with pytest.raises(AssertionError, match="inner"):
        tu.assert_tensordict_eq(nested(1.0), nested(2.0))
    joined = tu.concat_tensordict([nested(1.0), nested(2.0)])
    assert joined["inner", "deep", "x"].tolist() == [1, 1, 2, 2]


# ---- compare and lay out -------------------------------------------------------------------------


def test_equal_tables_are_equal():
    tu.assert_tensordict_eq(table(), table())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.pop("number"), "number"),
        (lambda data: data.set("number", torch.tensor([0, 1, 2, 9])), "number"),
        (lambda data: data.set("number", torch.arange(4).int()), "int32"),
        (lambda data: tu.assign_non_tensor_data(data, "number", 3), "NonTensorData"),
        (lambda data: data["ids"].values().add_(1), "ids"),
        (lambda data: tu.assign_non_tensor_stack(data, "chat", [1, 2, 3, 4]), "chat"),
        (lambda data: tu.assign_non_tensor_data(data, "temperature", 1.0), "temperature"),
    ],
)
def test_a_difference_is_an_assertion_error_that_names_it(change, message):
    data = table()
    change(data)
    with pytest.raises(AssertionError, match=message):
        tu.assert_tensordict_eq(table(), data)


def test_different_sizes_are_a_difference():
    with pytest.raises(AssertionError, match="different sizes"):
        tu.assert_tensordict_eq(table(), tu.unpad(table(), 1))


def test_contiguous_copies_only_what_is_not():
    plain = torch.arange(6).view(2, 3)
    holes = torch.nested.nested_tensor_from_jagged(
        torch.arange(5), torch.tensor([0, 3, 5]), torch.tensor([2, 1])
    )
    inner = TensorDict({"x": torch.arange(6).view(3, 2).T}, batch_size=[2])
    data = TensorDict(
        {"plain": plain, "t": plain.T[:2], "holes": holes, "inner": inner}, batch_size=[2]
    )
    tu.assign_non_tensor(data, name=["a", "b"], setting=1)
    packed = tu.contiguous(data)
    assert packed["plain"].data_ptr() == plain.data_ptr()
    assert packed["t"].is_contiguous()
    assert packed["t"].tolist() == [[0, 3], [1, 4]]
    assert packed["inner", "x"].is_contiguous()
    assert rows_of(packed["holes"]) == [[0, 1], [3]]
    assert packed["holes"].values().tolist() == [0, 1, 3]
    assert tu.get(packed, "name") == ["a", "b"]
    assert tu.get(packed, "setting") == 1


def test_position_ids_with_several_rows_per_token_are_made_jagged_in_dim_2():
    offsets = torch.tensor([0, 2, 4])
    wrong = torch.nested.nested_tensor_from_jagged(torch.arange(16).view(4, 4), offsets)
    data = TensorDict({"position_ids": wrong}, batch_size=[2])
    tu.maybe_fix_3d_position_ids(data)
    assert [tuple(row.shape) for row in data["position_ids"].unbind()] == [(4, 2), (4, 2)]
    tu.maybe_fix_3d_position_ids(data)  # nothing left to do
    assert data["position_ids"].unbind()[1].tolist()[0] == [2, 3]
    for other in (
        torch.zeros(2, 3),
        torch.nested.nested_tensor_from_jagged(torch.zeros(4), offsets),
    ):
        data = TensorDict({"position_ids": other}, batch_size=[2])
        tu.maybe_fix_3d_position_ids(data)
        assert data["position_ids"] is other
    tu.maybe_fix_3d_position_ids(TensorDict({}, batch_size=[2]))


@settings(max_examples=25, deadline=None, database=None)
@given(rows=st.lists(st.integers(-4, 3), max_size=6))
def test_any_choice_of_rows_keeps_the_entries_aligned(rows):
    check(tu.index_select_tensor_dict(table(), rows), [row % 4 for row in rows])

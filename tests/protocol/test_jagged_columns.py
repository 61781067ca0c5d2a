"""Rows of different lengths go through every operation, without padding."""

import pytest
import torch

from tests.protocol.batches import assert_same, jagged_rows, rows_of
from verl.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto

IDS = [[0, 1, 2], [3, 4], [5, 6, 7, 8]]


def check(data: DataProto, rows: list[int]) -> None:
    """All columns hold these rows of `jagged_rows`, and those that shared offsets still do."""
    assert data.batch["number"].tolist() == rows
    assert data.non_tensor_batch["name"].tolist() == ["abc"[row] for row in rows]
    assert rows_of(data.batch["ids"]) == [IDS[row] for row in rows]
    positions = [[[k * 9 + i for i in IDS[row]] for k in range(4)] for row in rows]
    assert rows_of(data.batch["positions"]) == positions
    product = data.batch["ids"] * data.batch["mask"]  # torch refuses unless they share
    assert rows_of(product) == [[i * (i % 2) for i in IDS[row]] for row in rows]


def test_rows_are_chosen_cut_repeated_and_padded():
    data = jagged_rows()
    check(data, [0, 1, 2])
    check(data.select_idxs([2, 0, 2]), [2, 0, 2])
    check(data[torch.tensor([False, True, True])], [1, 2])
    check(data[1:], [1, 2])
    check(data[::2], [0, 2])
    check(data[::-1], [2, 1, 0])
    check(data.repeat(2), [0, 0, 1, 1, 2, 2])
    check(data.repeat(2, interleave=False), [0, 1, 2, 0, 1, 2])
    check(data.sample_level_repeat([0, 2, 1]), [1, 1, 2])
    check(pad_dataproto_to_divisor(data, 5)[0], [0, 1, 2, 0, 1])
    check(unpad_dataproto(data, 1), [0, 1])
    data.padding(1, "first")
    check(data, [0, 1, 2, 0])
    data.reorder(torch.tensor([3, 2, 1, 0]))
    check(data, [0, 2, 1, 0])


def test_chunks_and_their_concatenation():
    data = jagged_rows()
    chunks = data.chunk(3)
    for row, chunk in enumerate(chunks):
        check(chunk, [row])
    check(DataProto.concat(chunks), [0, 1, 2])
    check(DataProto.concat([data[:2], data, data[2:]]), [0, 1, 0, 1, 2, 2])
    data.meta_info["_verl_auto_padding"] = True
    check(data.chunk(2)[0], [0, 1])
    check(data.chunk(2)[1], [2])


def test_mini_batches():
    batches = list(jagged_rows().make_iterator(1, 2))
    for batch, row in zip(batches, [0, 1, 2, 0, 1, 2], strict=True):
        check(batch, [row])


def test_one_row_is_a_dense_tensor():
    item = jagged_rows()[-1]
    assert item.batch["ids"].tolist() == [5, 6, 7, 8]
    assert item.batch["positions"].shape == (4, 4)


def test_no_rows_are_left():
    data = jagged_rows()[3:]
    assert len(data) == 0
    assert data.batch["ids"].shape[0] == 0
    assert_same(DataProto.concat([data, jagged_rows()]), jagged_rows())


def test_a_tensor_with_holes_loses_them_when_rows_are_chosen():
    holes = torch.nested.nested_tensor_from_jagged(
        torch.arange(9), torch.tensor([0, 3, 5, 9]), torch.tensor([2, 1, 4])
    )
    data = DataProto.from_dict({"x": holes})
    assert rows_of(data.select_idxs([2, 0]).batch["x"]) == [[5, 6, 7, 8], [0, 1]]
    assert rows_of(DataProto.concat([data, data[1:]]).batch["x"]) == [
        [0, 1],
        [3],
        [5, 6, 7, 8],
        [3],
        [5, 6, 7, 8],
    ]


def test_union_compares_jagged_columns_by_their_rows():
    data = jagged_rows()
    assert data.union(jagged_rows()) is data
    other = jagged_rows()
    other.batch["ids"].values()[0] = 77
    with pytest.raises(AssertionError, match="'ids'"):
        data.union(other)
    dense = DataProto.from_dict({"ids": torch.zeros(3, 4)})
    with pytest.raises(AssertionError, match="'ids'"):
        data.union(dense)


def test_jagged_and_dense_parts_are_not_joined():
    dense = DataProto.from_dict({"ids": torch.zeros(1, 4)})
    with pytest.raises(AssertionError, match=r"'ids'.*some parts are jagged"):
        DataProto.concat([jagged_rows().select(["ids"], []), dense])
    along_2 = DataProto.from_dict({"ids": jagged_rows().batch["positions"]})
    along_1 = DataProto.from_dict(
        {
            "ids": torch.nested.nested_tensor_from_jagged(
                torch.zeros(9, 4), torch.tensor([0, 3, 5, 9])
            )
        }
    )
    with pytest.raises(AssertionError, match=r"jagged dims differ: \[1, 2\]"):
        DataProto.concat([along_1, along_2])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_the_other_layout_of_nested_tensors_is_refused_with_the_way_out():
    strided = torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)])
    with pytest.raises(ValueError, match=r"layout=torch\.jagged"):
        DataProto.from_dict({"x": strided})

"""What two pieces of one tensor share is found without looking at a single element."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.utils.checkpoint.pieces import (
    FlatSlice,
    Overlap,
    Piece,
    divide,
    overlaps,
    piece_of,
    stretch,
    whole,
)


@st.composite
def pairs(draw):
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    return draw(pieces_of(shape)), draw(pieces_of(shape))


@st.composite
def pieces_of(draw, shape):
    grid = shape if draw(st.booleans()) else (int(np.prod(shape)),)
    start = tuple(draw(st.integers(0, extent)) for extent in grid)
    room = zip(grid, start, strict=True)
    return Piece(shape=shape, start=start, size=tuple(draw(st.integers(0, g - s)) for g, s in room))


def elements(piece):
    """The numbers of its elements, in the order in which the piece holds them."""
    numbers = np.arange(int(np.prod(piece.shape)))
    if len(piece.start) == len(piece.shape):
        numbers = numbers.reshape(piece.shape)
    box = tuple(slice(s, s + n) for s, n in zip(piece.start, piece.size, strict=True))
    return numbers[box].reshape(-1).tolist()


@settings(max_examples=400, deadline=None)
@given(pairs())
def test_pieces_share_the_elements_that_both_hold(pair):
    first, second = pair
    held, wanted = elements(first), elements(second)
    moved = {}
    for here, there, count in overlaps(first, second):
        for step in range(count):
            assert held[here + step] == wanted[there + step]
            assert there + step not in moved, "moved twice"
            moved[there + step] = held[here + step]
    assert sorted(moved.values()) == sorted(set(held) & set(wanted))


@settings(max_examples=200, deadline=None)
@given(pairs())
def test_runs_are_the_elements_of_a_piece_in_order(pair):
    starts, length = pair[0].runs()
    assert [int(start) + step for start in starts for step in range(length)] == elements(pair[0])


def test_equal_boxes_move_as_one_stretch():
    columns = Piece(shape=(4, 6), start=(0, 2), size=(4, 3))
    assert overlaps(columns, columns) == [Overlap(0, 0, 12)]


def test_rows_that_become_columns_move_row_by_row():
    rows = Piece(shape=(4, 6), start=(2, 0), size=(2, 6))
    columns = Piece(shape=(4, 6), start=(0, 3), size=(4, 3))
    assert overlaps(rows, columns) == [Overlap(3, 6, 3), Overlap(9, 9, 3)]


def test_shares_of_a_replica_cover_it_once():
    shares = [divide((5, 7), rank, 4) for rank in range(4)]
    assert [elements(share) for share in shares] == [
        list(range(8)),
        list(range(8, 17)),
        list(range(17, 26)),
        list(range(26, 35)),
    ]


def test_a_flat_slice_says_what_it_holds():
    part = FlatSlice(tensor=torch.zeros(5), shape=(4, 6), start=7)
    assert piece_of(part) == stretch((4, 6), 7, 5)
    assert piece_of(torch.zeros(2, 3)) == whole((2, 3))
    assert piece_of(torch.tensor(1.0)).num_elements == 1


@pytest.mark.parametrize(
    ("start", "size"), [((0, 5), (4, 2)), ((-1, 0), (1, 1)), ((20,), (5,)), ((0, 0), (4,))]
)
def test_a_piece_outside_its_tensor_is_refused(start, size):
    with pytest.raises(ValueError, match="does not lie inside"):
        Piece(shape=(4, 6), start=start, size=size)


def test_pieces_of_different_tensors_have_nothing_to_compare():
    with pytest.raises(ValueError, match="not the same tensor"):
        overlaps(whole((2, 3)), whole((3, 2)))

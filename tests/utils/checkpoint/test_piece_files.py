"""Ranks write what they hold; others, fewer or more, read what they need and nothing else."""

import json
import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.utils.two_ranks import run_on_ranks, run_on_two_ranks
from verl.utils.checkpoint import piece_files
from verl.utils.checkpoint.layout import CheckpointCorruptError
from verl.utils.checkpoint.piece_files import (
    pieces_to_write,
    read_into,
    read_piece,
    saved_world_size,
    stored_hf_tensors,
    stored_tensors,
    write_pieces,
)
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


def numbers(*shape, dtype=torch.float32):
    return torch.arange(torch.Size(shape).numel()).to(dtype).reshape(shape)


def flat_slices(tensors, rank, world_size):
    """Each tensor's share of a rank, as an engine that divides flattened weights has it."""
    parts = {}
    for name, tensor in tensors.items():
        share = divide(tensor.shape, rank, world_size)
        values = tensor.reshape(-1)[share.start[0] :][: share.num_elements].clone()
        parts[name] = FlatSlice(tensor=values, shape=tuple(tensor.shape), start=share.start[0])
    return parts


def save(folder, name, parts, rank, world_size, **options):
    held = pieces_to_write(parts, rank=rank, world_size=world_size)
    write_pieces(folder, name, held, rank=rank, world_size=world_size, **options)


TENSORS = {
    "matrix": numbers(5, 7),
    "half": numbers(3, 2, 4, dtype=torch.bfloat16),
    "scalar": torch.tensor(3.0),
    "empty": torch.zeros(0, 4),
    "vector": numbers(2, dtype=torch.int64),
}


@pytest.mark.parametrize("writers", [1, 2, 3])
@pytest.mark.parametrize("readers", [1, 2, 4])
def test_any_number_of_ranks_reads_what_another_number_wrote(tmp_path, writers, readers):
    for rank in range(writers):
        parts = flat_slices(TENSORS, rank, writers)
        save(tmp_path, "state", parts, rank, writers, max_shard_bytes=60)
    assert saved_world_size(tmp_path, "state") == writers
    stored = stored_tensors(tmp_path, "state")
    assert {name: tensor.shape for name, tensor in stored.items()} == {
        name: tuple(tensor.shape) for name, tensor in TENSORS.items()
    }
    for rank in range(readers):
        for name, part in flat_slices(TENSORS, rank, readers).items():
            expected = part.tensor.clone()
            part.tensor.fill_(99)
            read_into(stored[name], part)
            assert torch.equal(part.tensor, expected), (name, rank)


def test_what_every_rank_holds_is_written_once_in_equal_shares(tmp_path, monkeypatch):
    monkeypatch.setattr(piece_files, "MIN_DIVIDED_ELEMENTS", 10)
    parts = {"large": numbers(4, 6), "small": numbers(3)}
    held = [pieces_to_write(parts, rank=rank, world_size=2) for rank in range(2)]
    assert [[(item.name, item.tensor.tolist()) for item in part] for part in held] == [
        [("large", list(range(12))), ("small", [0, 1, 2])],
        [("large", list(range(12, 24)))],
    ]
    for rank in range(2):
        write_pieces(tmp_path, "model", held[rank], rank=rank, world_size=2)
    stored = stored_tensors(tmp_path, "model")
    found = read_piece(stored["large"], Piece(shape=(4, 6), start=(1, 2), size=(2, 3)))
    assert found.tolist() == [8, 9, 10, 14, 15, 16]


def on_mesh(shape, names, *placements):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return {
        f"{list(place)}": distribute_tensor(numbers(5, 7), mesh, list(place))
        for place in placements
    }


def dtensors(num_ranks):
    """One tensor in many divisions; 5 rows do not divide evenly."""
    parts = on_mesh((num_ranks,), ("shard",), [Shard(0)], [Shard(1)], [Replicate()])
    if num_ranks == 4:
        parts |= on_mesh(
            (2, 2), ("replicate", "shard"), [Replicate(), Shard(0)], [Shard(0), Shard(1)]
        )
    return parts


def divided_and_back(num_ranks, folder):
    """Save in every division on `num_ranks` ranks, read each in every other division."""

    def work(rank):
        parts = dtensors(num_ranks)
        save(folder, "state", parts, rank, num_ranks)
        torch.distributed.barrier()
        stored = stored_tensors(folder, "state")
        wrong = []
        for source in stored:
            for target, part in parts.items():
                expected = part.to_local().clone()
                part.to_local().fill_(-1)
                read_into(stored[source], part)
                if not torch.equal(part.to_local(), expected):
                    wrong.append((source, target))
        return wrong, sorted(stored)

    for wrong, names in run_on_ranks(num_ranks, work, folder):
        assert wrong == []
        assert len(names) == (3 if num_ranks == 2 else 5)
    for tensor in stored_tensors(folder, "state").values():
        assert torch.equal(read_piece(tensor, whole((5, 7))), torch.arange(35.0))


def test_divided_tensors_are_read_in_any_other_division(tmp_path):
    divided_and_back(2, tmp_path)


@pytest.mark.slow
def test_copies_among_four_ranks_are_written_once(tmp_path):
    divided_and_back(4, tmp_path)


def test_a_partial_sum_is_no_piece_of_a_tensor(tmp_path):
    def work(rank):
        from torch.distributed.tensor import DTensor, Partial

        mesh = init_device_mesh("cpu", (2,))
        part = DTensor.from_local(torch.zeros(2), mesh, [Partial()])
        with pytest.raises(ValueError, match="sharded and replicated tensors"):
            pieces_to_write({"sum": part}, rank=rank, world_size=2)

    run_on_two_ranks(work, tmp_path)


def test_only_the_bytes_of_the_wanted_piece_are_read(tmp_path, monkeypatch):
    save(tmp_path, "state", {"matrix": numbers(100, 10)}, 0, 1)
    stored = stored_tensors(tmp_path, "state")
    num_read, read = [], os.preadv

    def counting(descriptor, buffers, position):
        num_read.append(sum(len(buffer) for buffer in buffers))
        return read(descriptor, buffers, position)

    monkeypatch.setattr(os, "preadv", counting)
    read_piece(stored["matrix"], Piece(shape=(100, 10), start=(7, 0), size=(3, 10)))
    assert num_read == [3 * 10 * 4]


def test_the_weights_in_a_model_folder_are_whole_pieces(tmp_path):
    from safetensors.torch import save_file

    save_file({"w": numbers(4, 2, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    stored = stored_hf_tensors(tmp_path)
    assert read_piece(stored["w"], divide((4, 2), 1, 2)).tolist() == [4.0, 5.0, 6.0, 7.0]


# ---- damage --------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    for rank in range(2):
        save(tmp_path, "state", flat_slices({"w": numbers(4, 6)}, rank, 2), rank, 2)
    return tmp_path


def edit(folder, **changes):
    path = folder / "state.rank_1_of_2.json"
    content = json.loads(path.read_text())
    content["pieces"]["w"].update(changes)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"start": [13]}, "does not lie inside"),
        ({"start": [12.0]}, "not whole numbers"),
        ({"size": [11]}, "which is not Piece"),
        ({"shape": [6, 4]}, "disagree about w"),
        ({"dtype": "int32"}, "disagree about w"),
        ({"dtype": "os.system"}, "not a list of pieces"),
        ({"file": "../state.rank_0_of_2.safetensors"}, "not a file beside it"),
        ({"file": "manifest.json"}, "not a file beside it"),
    ],
)
def test_a_list_that_was_changed_is_refused(saved, changes, problem):
    edit(saved, **changes)
    with pytest.raises(CheckpointCorruptError, match=problem):
        stored_tensors(saved, "state")


@pytest.mark.parametrize("start", [6, 0])  # elements 18 to 23 are nowhere, or 12 to 23
def test_pieces_that_overlap_leave_others_out_and_are_refused(saved, start):
    edit(saved, start=[start])
    with pytest.raises(CheckpointCorruptError, match="overlap, or leave some of its 24"):
        stored_tensors(saved, "state")


def test_a_rank_that_is_missing_is_noticed(saved):
    (saved / "state.rank_1_of_2.json").unlink()
    with pytest.raises(CheckpointCorruptError, match="lacks the files of some ranks"):
        stored_tensors(saved, "state")
    assert saved_world_size(saved, "other") is None
    assert stored_tensors(saved, "other") == {}


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


def test_one_whole_dimension_inside_two_cut_ones_makes_a_run_per_plane():
    starts, length = Piece(shape=(4, 3, 5), start=(1, 1, 0), size=(2, 2, 5)).runs()
    assert (starts.tolist(), length) == ([20, 35], 10)


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


def test_a_file_that_holds_nothing_of_the_piece_is_not_opened(tmp_path):
    for rank in range(2):
        save(tmp_path, "state", flat_slices({"matrix": numbers(4, 2)}, rank, 2), rank, 2)
    matrix = stored_tensors(tmp_path, "state")["matrix"]
    matrix.pieces[1].file.unlink()
    found = read_piece(matrix, Piece(shape=(4, 2), start=(0, 0), size=(2, 2)))
    assert found.tolist() == [0, 1, 2, 3]

"""Which elements of a tensor a rank holds, and how to get from one division to another.

A tensor is the sequence of its elements in row-major order. A `Piece` is some of them: a box, or
one stretch of the sequence. Either is a number of equally long runs, so what two pieces share is
found by comparing runs, and a tensor that was divided among four ranks can be read by two, or one.

An engine hands over `Part`s: whole tensors, torch's own DTensors, or `FlatSlice`s.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard


@dataclass(frozen=True, kw_only=True)
class FlatSlice:
    """One stretch of a flattened tensor, as engines keep it that divide optimizer state evenly."""

    tensor: Tensor
    """(n,) elements `start`, `start + 1`, ... of the whole tensor in row-major order."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""

    start: int


Part = Tensor | DTensor | FlatSlice
"""What one rank holds of a tensor; a plain tensor is whole, and the same on every rank."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Some elements of a tensor of `shape`.

    `start` and `size` have an entry per dimension, or a single one that counts elements in
    row-major order.
    """

    shape: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]

    def __post_init__(self) -> None:
        grid = self._grid
        if not len(grid) == len(self.start) == len(self.size) or any(
            begin < 0 or extent < 0 or begin + extent > whole
            for begin, extent, whole in zip(self.start, self.size, grid, strict=True)
        ):
            raise ValueError(f"{self} does not lie inside the tensor")

    @property
    def num_elements(self) -> int:
        return prod(self.size)

    @property
    def _grid(self) -> tuple[int, ...]:
        is_stretch = len(self.start) == 1 and len(self.shape) != 1
        return (prod(self.shape),) if is_stretch else self.shape

    def runs(self) -> tuple[np.ndarray, int]:
        """Where each run begins in the whole tensor, ascending, and how long all of them are."""
        grid = self._grid
        inner = len(grid)  # dimensions from here on are taken whole
        while inner > 0 and self.size[inner - 1] == grid[inner - 1]:
            inner -= 1
        length = prod(self.size[max(inner - 1, 0) :])
        starts = np.zeros(1, dtype=np.int64)
        for dim, (begin, extent) in enumerate(zip(self.start, self.size, strict=True)):
            stride = prod(grid[dim + 1 :])
            steps = np.arange(extent if dim < inner - 1 else 1, dtype=np.int64)
            starts = (starts[:, None] + (begin + steps) * stride).reshape(-1)
        return (starts, length) if self.num_elements else (starts[:0], 0)


def whole(shape: Sequence[int]) -> Piece:
    return Piece(shape=tuple(shape), start=(0,) * len(shape), size=tuple(shape))


def stretch(shape: Sequence[int], start: int, num_elements: int) -> Piece:
    return Piece(shape=tuple(shape), start=(start,), size=(num_elements,))


def piece_of(part: Part) -> Piece:
    """Which elements `part` holds."""
    if isinstance(part, FlatSlice):
        return stretch(part.shape, part.start, part.tensor.numel())
    return _piece_of_dtensor(part) if isinstance(part, DTensor) else whole(part.shape)


def local_tensor(part: Part) -> Tensor:
    """The storage of what this rank holds; writing into it changes the engine's own."""
    if isinstance(part, FlatSlice):
        return part.tensor.detach()
    return part.to_local().detach() if isinstance(part, DTensor) else part.detach()


def is_kept_by_this_rank(part: DTensor) -> bool:
    """Of ranks that hold the same piece, one: the first along every dimension that replicates."""
    coordinate = part.device_mesh.get_coordinate()
    assert coordinate is not None, "a DTensor of a mesh that this rank is not in"
    return all(
        coord == 0 or not isinstance(placement, Replicate)
        for coord, placement in zip(coordinate, part.placements, strict=True)
    )


def divide(shape: Sequence[int], rank: int, world_size: int) -> Piece:
    """An equal share, in row-major order, of what every rank holds whole."""
    count = prod(shape)
    begin, end = (count * edge // world_size for edge in (rank, rank + 1))
    return stretch(shape, begin, end - begin)


def is_division(pieces: Sequence[Piece]) -> bool:
    """Whether pieces of one tensor hold each of its elements exactly once."""
    runs = [piece.runs() for piece in pieces]
    starts = np.concatenate([starts for starts, _ in runs])
    lengths = np.concatenate([np.full(len(starts), length) for starts, length in runs])
    order = np.argsort(starts)
    ends = np.cumsum(lengths[order])
    follows_on = (starts[order] == ends - lengths[order]).all()
    return bool(follows_on) and int(lengths.sum()) == prod(pieces[0].shape)


class Overlap(NamedTuple):
    """Elements that lie at one place in a piece and at another place in the other."""

    start_in_first: int
    start_in_second: int
    num_elements: int


def overlaps(first: Piece, second: Piece) -> list[Overlap]:
    """What two pieces of one tensor share, in as few stretches as possible."""
    if first.shape != second.shape:
        raise ValueError(f"{first.shape} and {second.shape} are not the same tensor")
    starts, length = first.runs()
    other_starts, other_length = second.runs()
    if not length or not other_length:
        return []
    low = np.searchsorted(starts + length, other_starts, side="right")
    high = np.searchsorted(starts, other_starts + other_length, side="left")
    counts = np.maximum(high - low, 0)
    ours = np.repeat(low - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
    theirs = np.repeat(np.arange(len(other_starts)), counts)
    begin = np.maximum(starts[ours], other_starts[theirs])
    end = np.minimum(starts[ours] + length, other_starts[theirs] + other_length)
    return _joined(
        ours * length + begin - starts[ours],
        theirs * other_length + begin - other_starts[theirs],
        end - begin,
    )


def _joined(first: np.ndarray, second: np.ndarray, counts: np.ndarray) -> list[Overlap]:
    """Stretches that continue each other in both pieces become one."""
    if not len(counts):
        return []
    goes_on = (first[1:] == first[:-1] + counts[:-1]) & (second[1:] == second[:-1] + counts[:-1])
    heads = np.flatnonzero(np.concatenate([[True], ~goes_on]))
    totals = np.add.reduceat(counts, heads)
    columns = (first[heads].tolist(), second[heads].tolist(), totals.tolist())
    return [Overlap(*row) for row in zip(*columns, strict=True)]


def _piece_of_dtensor(part: DTensor) -> Piece:
    """torch cuts a dimension into chunks of equal size, the last ones smaller or empty."""
    coordinate = part.device_mesh.get_coordinate()
    assert coordinate is not None, "a DTensor of a mesh that this rank is not in"
    start, size = [0] * part.dim(), list(part.shape)
    for mesh_dim, placement in enumerate(part.placements):
        if isinstance(placement, Replicate):
            continue
        if type(placement) is not Shard:
            raise ValueError(f"a checkpoint holds sharded and replicated tensors, not {placement}")
        dim = placement.dim
        chunk = -(-size[dim] // part.device_mesh.size(mesh_dim))
        begin = min(chunk * coordinate[mesh_dim], size[dim])
        start[dim] += begin
        size[dim] = min(chunk, size[dim] - begin)
    return Piece(shape=tuple(part.shape), start=tuple(start), size=tuple(size))

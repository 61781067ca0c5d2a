"""Jagged tensors: rows of different lengths in one buffer, cut at `offsets`.

Torch cannot index, slice or concatenate a jagged tensor by row; here is how, with one gather over
the buffer. Torch combines two jagged tensors (`a * b`) only when their offsets are the same object,
so the functions take a memo: within one operation over many columns, those that shared offsets
before it share them after it.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

TakeMemo: TypeAlias = dict[tuple[int, int], tuple[Tensor, Tensor]]
ConcatMemo: TypeAlias = dict[tuple[int, ...], Tensor]

_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


class BatchError(AssertionError, ValueError):
    """Things in a batch that do not fit together.

    A `ValueError`, because it is the caller's mistake; an `AssertionError` as well, because that is
    what code written for this interface has always caught.
    """


class JaggedParts(NamedTuple):
    """A jagged tensor taken apart; row i is `values[offsets[i] : offsets[i] + lengths[i]]`."""

    values: Tensor
    offsets: Tensor
    lengths: Tensor | None
    """None where every row ends where the next one starts."""
    dim: int
    """The dim whose length differs from row to row: 1 for (B, j, D), 2 for (B, 4, j)."""

    @property
    def row_lengths(self) -> Tensor:
        return self.offsets.diff() if self.lengths is None else self.lengths

    @property
    def is_compact(self) -> bool:
        """Whether the rows fill the buffer, without holes and in order."""
        size = self.values.shape[self.dim - 1]
        return self.lengths is None and int(self.offsets[0]) == 0 and int(self.offsets[-1]) == size


def is_nested(column: object) -> bool:
    return isinstance(column, Tensor) and column.is_nested


def open_jagged(tensor: Tensor) -> JaggedParts:
    if tensor.layout is not torch.jagged:
        raise BatchError(
            f"a nested tensor in a batch must have layout torch.jagged, got {tensor.layout}; "
            f"build it with torch.nested.as_nested_tensor(rows, layout=torch.jagged)"
        )
    dim = next(dim for dim, size in enumerate(tensor.shape) if isinstance(size, torch.SymInt))
    # Torch's type stubs do not know the methods of jagged tensors.
    values: Tensor = tensor.values()  # pyright: ignore[reportAssignmentType]
    offsets: Tensor = tensor.offsets()  # pyright: ignore[reportAttributeAccessIssue]
    lengths: Tensor | None = tensor.lengths()  # pyright: ignore[reportAttributeAccessIssue]
    return JaggedParts(values, offsets, lengths, dim)


def jagged(values: Tensor, offsets: Tensor, dim: int) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=dim)


def take_jagged(tensor: Tensor, index: Tensor, memo: TakeMemo) -> Tensor:
    """Copy the rows `index` of a jagged tensor."""
    parts = open_jagged(tensor)
    key = (id(parts.offsets), id(parts.lengths))
    if key not in memo:
        memo[key] = _plan_take(parts, index.to(tensor.device))
    positions, offsets = memo[key]
    return jagged(choose(parts.values, parts.dim - 1, positions), offsets, parts.dim)


def choose(tensor: Tensor, dim: int, index: Tensor) -> Tensor:
    """`index_select` for every type: torch lacks it for the wide unsigned integers."""
    signed = _SIGNED.get(tensor.dtype)
    if signed is None:
        return tensor.index_select(dim, index)
    return tensor.view(signed).index_select(dim, index).view(tensor.dtype)


def _plan_take(parts: JaggedParts, index: Tensor) -> tuple[Tensor, Tensor]:
    """Where each value of the chosen rows lies in the buffer, and the offsets of those rows."""
    starts, lengths = parts.offsets[:-1][index], parts.row_lengths[index]
    offsets = offsets_of(lengths)
    shift = (starts - offsets[:-1]).repeat_interleave(lengths)
    return torch.arange(len(shift), device=shift.device) + shift, offsets


def concat_jagged(tensors: Sequence[Tensor], memo: ConcatMemo) -> Tensor:
    """The rows of jagged tensors below each other."""
    key = tuple(id(open_jagged(tensor).offsets) for tensor in tensors)
    parts = [open_jagged(compact(tensor)) for tensor in tensors]
    dims = sorted({part.dim for part in parts})
    if len(dims) > 1:
        raise BatchError(f"cannot concatenate jagged tensors whose jagged dims differ: {dims}")
    if key not in memo:
        memo[key] = offsets_of(torch.cat([part.row_lengths for part in parts]))
    return jagged(torch.cat([part.values for part in parts], dims[0] - 1), memo[key], dims[0])


def compact(tensor: Tensor) -> Tensor:
    """The same rows with no holes between them: itself when there are none."""
    if open_jagged(tensor).is_compact:
        return tensor
    return take_jagged(tensor, torch.arange(len(tensor)), {})


def offsets_of(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def same_tensor(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors, dense or jagged, hold the same rows (as torch.equal: NaN is not NaN)."""
    if left.is_nested != right.is_nested:
        return False
    if not left.is_nested:
        return torch.equal(left, right.to(left.device))
    one, other = open_jagged(compact(left)), open_jagged(compact(right.to(left.device)))
    if one.dim != other.dim or not torch.equal(one.offsets, other.offsets):
        return False
    return torch.equal(one.values, other.values)

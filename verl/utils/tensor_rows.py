"""Rows of a table whose columns are tensors: select, slice, concatenate, iterate, compare.

A column has one row per entry of dim 0. It is a dense tensor, a jagged one, or a TensorDict with a
table inside. Slicing gives views of dense columns; selecting and concatenating copy.

A jagged tensor keeps rows of different lengths in one buffer, split at `offsets`. Torch cannot
index, slice or concatenate it by row; here one gather over the buffer does. Torch combines two
jagged tensors (`a * b`) only when their offsets are the same object, so the functions take a memo:
columns that shared offsets before an operation share them after it.

`deep_equal` compares nested Python values where plain `==` fails: arrays and tensors, NaN, and
values that contain themselves. What a batch holds besides tensors is left to `verl.protocol` and
`verl.utils.tensordict_utils`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torch.utils.data import DataLoader

Column: TypeAlias = Tensor | TensorDictBase
RowIndex: TypeAlias = Sequence[int] | Sequence[bool] | np.ndarray | Tensor
Table = TypeVar("Table")


# ---- which rows ----------------------------------------------------------------------------------


def as_row_index(rows: RowIndex, num_rows: int) -> Tensor:
    """Turn row numbers (negative ones count from the end) or a mask into numbers from 0 on."""
    index = rows if isinstance(rows, Tensor) else torch.as_tensor(np.asarray(rows))
    if index.dim() != 1:
        raise BatchError(f"rows are chosen by a 1-D index or mask, got shape {tuple(index.shape)}")
    if index.dtype == torch.bool:
        if len(index) != num_rows:
            raise IndexError(f"a mask needs one entry per row: {len(index)} for {num_rows} rows")
        return index.nonzero().squeeze(1)
    if index.numel() == 0:
        return index.long()
    if index.is_floating_point() or index.is_complex():
        raise BatchError(f"rows are chosen by integers or a bool mask, got {index.dtype}")
    return _wrap_negative(index.long(), num_rows)


def _wrap_negative(index: Tensor, num_rows: int) -> Tensor:
    low, high = int(index.min()), int(index.max())
    if low < -num_rows or high >= num_rows:
        row = low if low < -num_rows else high
        raise IndexError(f"row {row} is out of range: there are {num_rows} rows")
    return index if low >= 0 else torch.where(index < 0, index + num_rows, index)


def chunk_sizes(num_rows: int, chunks: int) -> list[int]:
    """The rule of `torch.chunk`, ceil(num_rows / chunks) rows as long as there are any: 10 in 4 are
    3, 3, 3, 1. Always `chunks` sizes, where torch would leave out empty chunks."""
    size = -(-num_rows // chunks)
    return [max(0, min(size, num_rows - size * i)) for i in range(chunks)]


# ---- choose and cut ------------------------------------------------------------------------------


def take_rows(columns: Mapping[str, Column], index: Tensor) -> dict[str, Column]:
    """Copy the rows `index` (from `as_row_index`) of every column."""
    memo: TakeMemo = {}
    return {name: _take(column, index, memo) for name, column in columns.items()}


def slice_rows(columns: Mapping[str, Column], rows: range) -> dict[str, Column]:
    """The rows of `rows` in every column, as views of dense columns if the step is positive."""
    if rows.step < 0:
        return take_rows(columns, _row_numbers(rows))
    window = slice(rows.start, rows.stop, rows.step)
    cut = {name: column[window] for name, column in columns.items() if not is_nested(column)}
    if len(cut) == len(columns):
        return cut
    nested = {name: column for name, column in columns.items() if is_nested(column)}
    cut |= take_rows(nested, _row_numbers(rows))
    return {name: cut[name] for name in columns}


def split_rows(batch: TensorDict, sizes: list[int]) -> list[TensorDict]:
    """Cut a table into consecutive pieces of `sizes` rows, with views of dense columns."""
    columns: dict[str, Any] = dict(batch.items())
    if not any(is_nested(column) for column in columns.values()):
        is_even = len(batch) > 0 and sizes.count(sizes[0]) == len(sizes)
        return list(batch.chunk(len(sizes)) if is_even else batch.split(sizes))  # chunk is quicker
    windows = [range(*bounds) for bounds in pairwise([0, *np.cumsum(sizes).tolist()])]
    return [
        TensorDict(slice_rows(columns, rows), batch_size=[len(rows)], device=batch.device)
        for rows in windows
    ]


def repeat_rows(
    columns: Mapping[str, Column], times: int, *, num_rows: int, interleave: bool
) -> dict[str, Column]:
    """Every row `times` times: AABB when interleaved, ABAB otherwise."""
    order = torch.arange(num_rows)
    index = order.repeat_interleave(times) if interleave else order.repeat(times)
    memo: TakeMemo = {}

    def repeated(column: Column) -> Column:
        if not isinstance(column, Tensor) or column.is_nested:
            return _take(column, index, memo)
        if interleave:
            return column.repeat_interleave(times, dim=0)
        return column.repeat(times, *[1] * (column.dim() - 1))

    return {name: repeated(column) for name, column in columns.items()}


def _row_numbers(rows: range) -> Tensor:
    return torch.from_numpy(np.arange(rows.start, rows.stop, rows.step))


TakeMemo: TypeAlias = dict[tuple[int, int], tuple[Tensor, Tensor]]


def _take(column: Column, index: Tensor, memo: TakeMemo) -> Column:
    if not isinstance(column, Tensor):
        return column[index]
    if column.is_nested:
        return take_jagged(column, index, memo)
    return choose(column, 0, index.to(column.device))


# ---- join ----------------------------------------------------------------------------------------


def concat_rows(parts: Sequence[Mapping[str, Column]]) -> dict[str, Column]:
    """The rows of all parts below each other; every part must have the same columns."""
    for number, part in enumerate(parts):
        if part.keys() != parts[0].keys():
            raise BatchError(
                f"cannot concatenate: part 0 has the columns {sorted(parts[0])}, "
                f"part {number} has {sorted(part)}; select the common ones first"
            )
    memo: ConcatMemo = {}
    return {name: _concat(name, [part[name] for part in parts], memo) for name in parts[0]}


ConcatMemo: TypeAlias = dict[tuple[int, ...], Tensor]


def _concat(name: str, columns: list[Any], memo: ConcatMemo) -> Column:
    num_nested = sum(is_nested(column) for column in columns)
    if num_nested == len(columns):
        return concat_jagged(columns, memo)
    if num_nested:
        raise BatchError(f"cannot concatenate column {name!r}: some parts are jagged, some are not")
    widths = {tuple(column.shape[1:]) for column in columns}
    if len(widths) > 1:
        raise BatchError(
            f"cannot concatenate column {name!r}: the shapes after the row dim differ, "
            f"{sorted(widths)}; pad the parts to a common length first"
        )
    return torch.cat(columns)


# ---- mini-batches --------------------------------------------------------------------------------


def iterate_minibatches(
    choose: Callable[[list[int]], Table],
    *,
    num_rows: int,
    mini_batch_size: int,
    epochs: int,
    seed: int | None,
    dataloader_kwargs: Mapping[str, Any] | None,
) -> Iterator[Table]:
    """Yield `choose(row numbers)` for every mini-batch of every epoch.

    The order is that of a torch `DataLoader` with `dataloader_kwargs` (`shuffle=True`, a sampler,
    ...) and, when `seed` is given, a generator of its own: the same seed replays the same epochs.
    """
    if mini_batch_size < 1 or num_rows % mini_batch_size:
        raise BatchError(
            f"mini_batch_size ({mini_batch_size}) must divide the batch of {num_rows} rows; "
            f"{_nearest_divisors(num_rows, mini_batch_size)}"
        )
    loader = DataLoader(
        range(num_rows),  # pyright: ignore[reportArgumentType]
        batch_size=mini_batch_size,
        collate_fn=choose,
        generator=None if seed is None else torch.Generator().manual_seed(seed),
        **(dataloader_kwargs or {}),
    )
    return (minibatch for _ in range(epochs) for minibatch in loader)


def _nearest_divisors(num_rows: int, wanted: int) -> str:
    divisors = [size for size in range(1, num_rows + 1) if num_rows % size == 0]
    below = [size for size in divisors if size < wanted][-1:]
    above = [size for size in divisors if size > wanted][:1]
    nearest = " and ".join(str(size) for size in below + above)
    return f"the nearest choices are {nearest}" if nearest else "it must be at least 1"


_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


class BatchError(AssertionError, ValueError, RuntimeError):
    """Things in a batch that do not fit together.

    A `ValueError`, because it is the caller's mistake; an `AssertionError` and a `RuntimeError` as
    well, because that is what code written for this interface has always caught.
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


def deep_equal(left: Any, right: Any) -> bool:
    """Compare containers, arrays and tensors by content, anything else by `==`; NaN equals NaN.

    Two values with cycles are equal when no walk through both ever finds a difference.
    """
    pending = [(left, right)]
    compared: set[tuple[int, int]] = set()
    while pending:
        one, other = pending.pop()
        if one is other or (id(one), id(other)) in compared:
            continue
        if not _is_container(one):
            if _is_container(other) or not _same_leaf(one, other):
                return False
            continue
        compared.add((id(one), id(other)))
        pairs = _pair_up(one, other)
        if pairs is None:
            return False
        pending.extend(pairs)
    return True


def _is_container(value: Any) -> bool:
    return isinstance(value, Mapping | list | tuple) or _is_object_array(value)


def _is_object_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == object


def _pair_up(one: Any, other: Any) -> Iterable[tuple[Any, Any]] | None:
    """The elements to compare in turn, or None when the containers already differ."""
    if isinstance(one, Mapping):
        if not isinstance(other, Mapping) or one.keys() != other.keys():
            return None
        return [(value, other[key]) for key, value in one.items()]
    if isinstance(one, np.ndarray):
        if not isinstance(other, np.ndarray) or one.shape != other.shape:
            return None
        return zip(one.ravel().tolist(), other.ravel().tolist(), strict=True)
    kind = tuple if isinstance(one, tuple) else list
    if not isinstance(other, kind) or len(one) != len(other):
        return None
    return zip(one, other, strict=True)


def _same_leaf(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and same_tensor(one, other)
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return _same_array(one, other)
    return bool(one == other) or (_is_nan(one) and _is_nan(other))


def _same_array(one: Any, other: Any) -> bool:
    if not isinstance(one, np.ndarray) or not isinstance(other, np.ndarray):
        return False
    can_hold_nan = one.dtype.kind in "fc" and other.dtype.kind in "fc"
    return np.array_equal(one, other, equal_nan=can_hold_nan)


def _is_nan(value: Any) -> bool:
    """NaN is the one number that differs from itself."""
    return isinstance(value, float | complex | np.floating | np.complexfloating) and value != value

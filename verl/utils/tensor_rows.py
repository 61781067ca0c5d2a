"""Rows of a table whose columns are tensors: choose them, cut them, join them, walk over them.

A column has one row per entry of dim 0. It is a dense tensor, a jagged one, or a TensorDict with a
table inside. Cutting gives views of dense columns; choosing and joining copy. What a batch is made
of besides tensors is left to `verl.protocol` and `verl.utils.tensordict_utils`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torch.utils.data import DataLoader

from verl.utils.jagged import (
    BatchError,
    ConcatMemo,
    TakeMemo,
    choose,
    concat_jagged,
    is_nested,
    take_jagged,
)

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

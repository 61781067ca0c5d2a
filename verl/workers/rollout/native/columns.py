"""A dataclass whose fields are tensors with one entry per row, read and written by rows."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from verl.workers.rollout.native.one_copy import in_one_copy

ColumnsT = TypeVar("ColumnsT", bound="Columns")


@dataclass(frozen=True, eq=False)
class Columns:
    """Fields are tensors, or Columns themselves, all of the same length."""

    def __getitem__(self: ColumnsT, rows: Any) -> ColumnsT:
        """The same columns for some rows; for a slice they are views of these."""
        return type(self)(**{name: column[rows] for name, column in vars(self).items()})

    def __setitem__(self: ColumnsT, rows: Any, other: ColumnsT) -> None:
        for name, column in vars(self).items():
            column[rows] = vars(other)[name]

    def zeros(self: ColumnsT, num_rows: int) -> ColumnsT:
        """Columns of these kinds with `num_rows` rows of zeros."""
        return type(self)(
            **{
                name: column.zeros(num_rows)
                if isinstance(column, Columns)
                else column.new_zeros(num_rows, *column.shape[1:])
                for name, column in vars(self).items()
            }
        )

    def to(self: ColumnsT, device: torch.device) -> ColumnsT:
        """These columns, which are in ordinary memory, on `device`."""
        return self._with(iter(in_one_copy(list(self._tensors()), device)))

    def _tensors(self) -> Iterator[Tensor]:
        for column in vars(self).values():
            yield from column._tensors() if isinstance(column, Columns) else [column]

    def _with(self: ColumnsT, tensors: Iterator[Tensor]) -> ColumnsT:
        """Columns of the same names with other tensors, in the order of `_tensors`."""
        return type(self)(
            **{
                name: column._with(tensors) if isinstance(column, Columns) else next(tensors)
                for name, column in vars(self).items()
            }
        )

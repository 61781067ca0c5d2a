"""A dataclass whose fields are tensors with one entry per row, read and written by rows."""

from dataclasses import dataclass
from typing import Any, TypeVar

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

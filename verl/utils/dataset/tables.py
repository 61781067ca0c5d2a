"""Files of rows: parquet, JSON (an array of objects) and JSON Lines.

A row is read when it is asked for and forgotten afterwards; what stays in memory is a few bytes per
row that say where it is. A file that cannot be read at all is an error; a row that cannot be read
is handed on as a `BadRow`, for the caller to decide. `row_table` joins files to one table.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from verl.utils.environment import BadData

DEFAULT_CACHE = "~/.cache/verl/rlhf"


class DataError(BadData, ValueError):
    """Data that no run can start with."""


@dataclass(frozen=True)
class BadRow:
    """A row that is left out: where it is, counted from 1, and what is wrong with it."""

    file: str
    row: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.row}: {self.reason}"


Row = dict[str, Any] | BadRow


class RowFile(ABC):
    """The rows of one file, numbered from 0. Pickled, it is its path: the copy opens it again."""

    def __init__(self, path: str) -> None:
        self.path = path

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, row: int) -> Row:
        """The row as plain Python values, or a `BadRow`."""

    @abstractmethod
    def __reduce__(self) -> tuple[Any, ...]:
        """How to open the file again; rows do not travel."""

    def scan(self, columns: Collection[str]) -> Iterator[Row]:
        """Every row in order, as far as `columns` go.

        The other columns are looked at too, so that a row that cannot be read comes out as a
        `BadRow`, but a file may leave them out.
        """
        return (self.read(row) for row in range(len(self)))

    def __iter__(self) -> Iterator[Row]:
        return (self.read(row) for row in range(len(self)))

    def number(self, row: int) -> int:
        """What people call the row: its number, or its line, counted from 1."""
        return row + 1

    def bad(self, row: int, reason: object) -> BadRow:
        return BadRow(self.path, self.number(row), str(reason))

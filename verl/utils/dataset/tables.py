"""Files of rows as one table: parquet, JSON (an array of objects) and JSON Lines.

A row is read when it is asked for. Parquet files are memory-mapped and kept in Arrow's form, so a
million prompts cost about their size; JSON files are parsed once. A file that cannot be read at all
is an error; a row that cannot be read is handed on as a `BadRow`, for the caller to decide.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl.utils.exit_codes import BadData
from verl.utils.fs import copy_to_local

JSON_LINES = (".jsonl", ".ndjson")


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
    """The rows of one file, numbered from 0."""

    def __init__(self, path: str) -> None:
        self.path = path

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, row: int) -> Row:
        """The row as plain Python values, or a `BadRow`."""

    def __iter__(self) -> Iterator[Row]:
        return (self.read(row) for row in range(len(self)))

    def bad(self, row: int, reason: object) -> BadRow:
        return BadRow(self.path, row + 1, str(reason))


class ParquetFile(RowFile):
    def __init__(self, path: str) -> None:
        super().__init__(path)
        try:
            self._table = pq.read_table(path, memory_map=True)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise DataError(f"{path} is not a readable parquet file: {error}") from error

    def __len__(self) -> int:
        return self._table.num_rows

    def read(self, row: int) -> Row:
        try:
            return self._table.slice(row, 1).to_pylist()[0]
        except (pa.ArrowException, OverflowError, ValueError) as error:
            return self.bad(row, f"cannot be read: {error}")

    def __iter__(self) -> Iterator[Row]:
        start = 0
        for batch in self._table.to_batches(max_chunksize=1024):
            try:
                rows: list[Row] = list(batch.to_pylist())
            except (pa.ArrowException, OverflowError, ValueError):  # one of them: find it
                rows = [self.read(row) for row in range(start, start + batch.num_rows)]
            yield from rows
            start += batch.num_rows


class JsonFile(RowFile):
    """Each row of JSON Lines is parsed when it is read; an array is parsed as a whole."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._rows: Sequence[Any]
        octets = Path(path).read_bytes()
        if path.endswith(JSON_LINES) or not octets.lstrip().startswith(b"["):
            self._rows = [line for line in octets.split(b"\n") if line.strip()]
            return
        try:
            self._rows = json.loads(octets)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path} is not readable JSON: {error}") from error

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, row: int) -> Row:
        value = self._rows[row]
        if isinstance(value, bytes):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError) as error:
                return self.bad(row, f"is not readable JSON: {error}")
        if not isinstance(value, dict):
            return self.bad(row, f"is {type(value).__name__}, not an object with columns")
        return value


def open_files(
    paths: str | Sequence[str], *, cache_dir: str | None = None, use_shm: bool = False
) -> list[RowFile]:
    """Open local files, and copies of remote ones."""
    names = [paths] if isinstance(paths, str) else list(paths)
    opened: list[RowFile] = []
    for name in names:
        local = copy_to_local(
            str(Path(name).expanduser()) if "://" not in name else name,
            cache_dir=None if cache_dir is None else str(Path(cache_dir).expanduser()),
            use_shm=use_shm,
        )
        if not Path(local).is_file():
            raise DataError(f"there is no file {name!r}")
        kind = ParquetFile if Path(local).suffix == ".parquet" else JsonFile
        if kind is JsonFile and Path(local).suffix not in (".json", *JSON_LINES):
            raise DataError(
                f"{name!r} is neither .parquet nor .json nor .jsonl; convert it to one of these"
            )
        opened.append(kind(local))
    return opened

"""`RowTable`: rows of several files as one sequence, of which some may be chosen.

A row is a number that counts through all files; eight bytes each are all that the table holds. It
offers what a Hugging Face dataset offers here (`len`, `[i]`, `select`), so code that reads one
reads the other.
"""

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from verl.utils.dataset.tables import (
    DEFAULT_CACHE,
    JSON_LINES,
    BadRow,
    DataError,
    JsonFile,
    ParquetFile,
    Row,
    RowFile,
)
from verl.utils.fs import copy_to_local


class RowTable:
    """All rows of `files`, or those whose `numbers` are given, in that order."""

    def __init__(self, files: Sequence[RowFile], numbers: np.ndarray | None = None) -> None:
        self.files = list(files)
        self._starts = np.concatenate([[0], np.cumsum([len(file) for file in self.files])])
        self.numbers = np.arange(self._starts[-1], dtype=np.int64) if numbers is None else numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, item: int) -> dict[str, Any]:
        file, row = self._whereabouts(int(self.numbers[item]))
        found = file.read(row)
        if isinstance(found, BadRow):
            raise DataError(f"{found} (it was readable when the dataset was made)")
        return found

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[item] for item in range(len(self)))

    def select(self, indices: Sequence[int] | np.ndarray) -> "RowTable":
        """The rows at these places, in this order."""
        return RowTable(self.files, self.numbers[np.asarray(indices, dtype=np.int64)])

    def place(self, item: int) -> str:
        """Where a row comes from, as in `train.jsonl:7`."""
        file, row = self._whereabouts(int(self.numbers[item]))
        return f"{file.path}:{file.number(row)}"

    def bad(self, number: int, reason: object) -> BadRow:
        file, row = self._whereabouts(number)
        return file.bad(row, reason)

    def scan(self, columns: Collection[str]) -> Iterator[Row]:
        """Every row of every file in the order of the numbers; see `RowFile.scan`."""
        for file in self.files:
            yield from file.scan(columns)

    def _whereabouts(self, number: int) -> tuple[RowFile, int]:
        file = int(self._starts.searchsorted(number, side="right")) - 1
        return self.files[file], number - int(self._starts[file])


def open_table(
    paths: str | Sequence[str], *, cache_dir: str | None = None, use_shm: bool = False
) -> RowTable:
    """Open local files, and copies of remote ones."""
    names = [paths] if isinstance(paths, str) else list(paths)
    return RowTable([open_file(name, cache_dir, use_shm) for name in names])


def open_file(name: str, cache_dir: str | None, use_shm: bool) -> RowFile:
    cache = str(Path(cache_dir or DEFAULT_CACHE).expanduser())
    source = name if "://" in name else str(Path(name).expanduser())
    try:
        local = copy_to_local(source, cache_dir=cache, use_shm=use_shm)
    except FileNotFoundError as error:
        raise DataError(f"there is no file {name!r}") from error
    if not Path(local).is_file():
        raise DataError(f"there is no file {name!r}")
    suffix = Path(local).suffix
    if suffix == ".parquet":
        return ParquetFile(local, cache)
    if suffix in (".json", *JSON_LINES):
        return JsonFile(local)
    raise DataError(
        f"{name!r} is neither .parquet nor .json nor .jsonl; convert it to one of these"
    )

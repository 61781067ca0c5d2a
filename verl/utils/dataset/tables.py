"""Files of rows: parquet, JSON (an array of objects) and JSON Lines, joined to one `RowTable`.

A row is read when it is asked for and forgotten afterwards; what stays in memory is a few bytes per
row that locate it. A file that cannot be read at all is an error; a row that cannot be read is
handed on as a `BadRow`, for the caller to decide. A table offers what a Hugging Face dataset offers
here (`len`, `[i]`, `select`), so code that reads one reads the other.

JSON is memory-mapped with an index of where each row begins and ends; only an array is parsed once
to find it. Parquet is compressed in groups of up to a million rows, so a file is unpacked once: a
small one into memory, a large one into a memory-mapped Arrow file in the cache folder.
"""

import hashlib
import json
import logging
import mmap
import os
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock

from verl.utils.environment import BadData
from verl.utils.fs import copy_to_local, own_folder

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
        """The rows at these indices, in this order."""
        return RowTable(self.files, self.numbers[np.asarray(indices, dtype=np.int64)])

    def location(self, item: int) -> str:
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


JSON_LINES = (".jsonl", ".ndjson")
SCANNED_BYTES = 16 << 20
NEW_LINE = ord("\n")
SPACES = np.frombuffer(b" \t\r\x0b\x0c", dtype=np.uint8)


def elements(text: str) -> Iterator[tuple[int, int]]:
    """(start, end) of each element of a JSON array, counted in bytes."""
    decoder = json.JSONDecoder()
    index = after_spaces(text, text.index("[") + 1)
    num_bytes, counted = 0, 0  # bytes of the text before character `counted`
    is_first = True
    while is_first or text[index : index + 1] == ",":
        if not is_first:
            index = after_spaces(text, index + 1)
        elif text[index : index + 1] == "]":
            break
        is_first = False
        _, end = decoder.raw_decode(text, index)
        num_bytes += len(text[counted:index].encode("utf-8"))
        start = num_bytes
        num_bytes += len(text[index:end].encode("utf-8"))
        counted = end
        yield start, num_bytes
        index = after_spaces(text, end)
    if text[index : index + 1] != "]" or text[index + 1 :].strip():
        raise ValueError(f"expected ',' or ']' at character {index}")


class JsonFile(RowFile):
    """`.jsonl` is JSON Lines; `.json` is an array when it begins with a bracket, else lines."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._octets = map_file(path)
        self._lines: np.ndarray | None = None
        is_array = not path.endswith(JSON_LINES) and starts_with_bracket(self._octets)
        if is_array:
            self._starts, self._ends = element_bounds(path, self._octets)
        else:
            self._starts, self._ends, lines = line_bounds(self._octets)
            has_blanks = len(lines) and lines[-1] >= len(lines)
            self._lines = lines if has_blanks else None

    def __len__(self) -> int:
        return len(self._starts)

    def __reduce__(self) -> tuple[Any, ...]:
        return JsonFile, (self.path,)

    def number(self, row: int) -> int:
        return row + 1 if self._lines is None else int(self._lines[row]) + 1

    def read(self, row: int) -> Row:
        text = self._octets[self._starts[row] : self._ends[row]]
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            return self.bad(row, f"is not readable JSON: {error}")
        if not isinstance(value, dict):
            return self.bad(row, f"is {type(value).__name__}, not an object with columns")
        if b"\\u" in text and not is_unicode(value):
            return self.bad(row, "is not valid Unicode: it holds half of a surrogate pair")
        return value


def map_file(path: str) -> mmap.mmap | bytes:
    """The bytes of a file, in memory only while they are looked at."""
    if not Path(path).stat().st_size:
        return b""  # there is nothing to map
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def starts_with_bracket(octets: mmap.mmap | bytes) -> bool:
    return octets[:4096].lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"["


def line_bounds(octets: mmap.mmap | bytes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where each line begins and ends, and its number; blank lines are passed over."""
    size = len(octets)
    if not size:
        return np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64)
    data = np.frombuffer(octets, dtype=np.uint8)
    line_ends = np.concatenate(
        [
            np.flatnonzero(data[start : start + SCANNED_BYTES] == NEW_LINE) + start
            for start in range(0, size, SCANNED_BYTES)
        ]
    )
    starts = np.concatenate([[0], line_ends + 1])
    ends = np.concatenate([line_ends, [size]])
    # Few lines begin with a space, so only those are looked at as a whole.
    first = data[np.minimum(starts, size - 1)]
    is_blank = starts == ends
    for line in np.flatnonzero(np.isin(first, SPACES) & ~is_blank):
        is_blank[line] = not octets[starts[line] : ends[line]].strip()
    kept = np.flatnonzero(~is_blank)
    return starts[kept], ends[kept], kept


def element_bounds(path: str, octets: mmap.mmap | bytes) -> tuple[np.ndarray, np.ndarray]:
    """Where each element of the array begins and ends."""
    try:
        bounds = np.array(list(elements(octets[:].decode("utf-8-sig"))), dtype=np.int64)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not readable JSON: {error}") from error
    shift = 3 if octets[:3] == b"\xef\xbb\xbf" else 0  # the mark that decoding took away
    bounds = bounds.reshape(-1, 2) + shift
    return bounds[:, 0].copy(), bounds[:, 1].copy()


def after_spaces(text: str, index: int) -> int:
    while text[index : index + 1] in (" ", "\t", "\r", "\n"):
        index += 1
    return index


def is_unicode(value: Any) -> bool:
    """Whether every text inside can be written as UTF-8; JSON's escapes allow more."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


logger = logging.getLogger(__name__)
MAX_BYTES_IN_MEMORY = 64 << 20
BATCH_BYTES = 4 << 20
MAX_BATCH_ROWS = 1024
LOCK_TIMEOUT_SECONDS = 3600.0
UNREADABLE = (pa.ArrowException, OverflowError, ValueError)


def is_plain(kind: pa.DataType) -> bool:
    """Text, bytes, numbers, and what is built from them: every valid value is a Python value."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return is_plain(kind.value_type)
    if pa.types.is_struct(kind):
        return all(is_plain(kind.field(index).type) for index in range(kind.num_fields))
    tests = (
        pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary,
        pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_null,
    )  # fmt: skip
    return any(test(kind) for test in tests)


# ---- unpacking -----------------------------------------------------------------------------------

BatchAt = Callable[[int], pa.RecordBatch]


def packed_batches(path: Path) -> Iterator[pa.RecordBatch]:
    file = pq.ParquetFile(path, memory_map=True, pre_buffer=False)
    metadata = file.metadata
    groups = range(metadata.num_row_groups)
    num_bytes = sum(metadata.row_group(group).total_byte_size for group in groups)
    rows = BATCH_BYTES * metadata.num_rows // max(1, num_bytes)
    return file.iter_batches(batch_size=max(1, min(MAX_BATCH_ROWS, rows)))


def unpack_to(target: Path, path: Path) -> None:
    """Write the rows as an Arrow file, which appears under its name when it is whole."""
    partial = target.with_name(f".{uuid.uuid4().hex}.partial")
    try:
        with FileLock(own_folder(target.parent) / ".arrow.lock", timeout=LOCK_TIMEOUT_SECONDS):
            if target.is_file():
                return  # another process was faster
            for outdated in target.parent.glob(f"{target.name.partition('-')[0]}-*.arrow"):
                outdated.unlink(missing_ok=True)
            write_arrow(partial, path)
            os.replace(partial, target)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{path} cannot be unpacked to {target.parent}: {error}") from error
    finally:
        partial.unlink(missing_ok=True)


def mapped(target: Path) -> tuple[BatchAt, list[int]]:
    reader = pa.ipc.open_file(pa.memory_map(str(target)))
    sizes = [reader.get_batch(index).num_rows for index in range(reader.num_record_batches)]
    return reader.get_batch, sizes


def cached_name(path: Path, folder: Path) -> Path:
    """A name that belongs to this file in its present state."""
    source = path.resolve()
    state = source.stat()
    whole = hashlib.sha256(str(source).encode()).hexdigest()[:24]
    version = hashlib.sha256(f"{state.st_size} {state.st_mtime_ns}".encode()).hexdigest()[:16]
    return folder / "arrow" / f"{whole}-{version}.arrow"


class ParquetFile(RowFile):
    """More than `max_bytes_in_memory` of unpacked rows go to a file below `cache_dir`."""

    def __init__(
        self,
        path: str,
        cache_dir: str | None = None,
        max_bytes_in_memory: int = MAX_BYTES_IN_MEMORY,
    ) -> None:
        super().__init__(path)
        self.cache_dir = cache_dir
        self.max_bytes_in_memory = max_bytes_in_memory
        folder = Path(cache_dir or DEFAULT_CACHE).expanduser()
        self._batch, sizes = unpacked(Path(path), folder, max_bytes_in_memory)
        self._starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __reduce__(self) -> tuple[Any, ...]:
        return ParquetFile, (self.path, self.cache_dir, self.max_bytes_in_memory)

    def read(self, row: int) -> Row:
        number = int(self._starts.searchsorted(row, side="right")) - 1
        try:
            one = self._batch(number).slice(row - int(self._starts[number]), 1)
            return one.to_pylist()[0]
        except UNREADABLE as error:
            return self.bad(row, f"cannot be read: {error}")

    def scan(self, columns: Collection[str]) -> Iterator[Row]:
        for number in range(len(self._starts) - 1):
            yield from self._scan_batch(number, columns)

    def _scan_batch(self, number: int, columns: Collection[str]) -> Sequence[Row]:
        batch = self._batch(number)
        try:
            batch.validate(full=True)
            return checked_columns(batch, columns).to_pylist()
        except UNREADABLE:  # one of them: find it
            return [self.read(row) for row in range(*map(int, self._starts[number : number + 2]))]


def checked_columns(batch: pa.RecordBatch, columns: Collection[str]) -> pa.RecordBatch:
    """The named columns, and those of which validation does not say that Python can read them."""
    return batch.select(
        [
            index
            for index, column in enumerate(batch.schema)
            if column.name in columns or not is_plain(column.type)
        ]
    )


def unpacked(path: Path, folder: Path, max_bytes: int) -> tuple[BatchAt, list[int]]:
    """The rows in batches: how to get one, and how many rows each has."""
    target = cached_name(path, folder)
    if target.is_file():
        try:
            own_folder(target.parent)
            return mapped(target)
        except PermissionError as foreign:
            raise DataError(f"{path} is not read from its unpacked copy: {foreign}") from foreign
        except (pa.ArrowException, OSError) as error:
            logger.warning("%s is unpacked again: its copy is damaged (%s)", path, error)
            target.unlink(missing_ok=True)
    try:
        kept: list[pa.RecordBatch] = []
        num_bytes = 0
        for batch in packed_batches(path):
            kept.append(batch)
            num_bytes += batch.nbytes
            if num_bytes > max_bytes:
                break
        else:
            return kept.__getitem__, [batch.num_rows for batch in kept]
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{path} is not a readable parquet file: {error}") from error
    del kept
    unpack_to(target, path)
    return mapped(target)


def write_arrow(target: Path, path: Path) -> None:
    schema = pq.read_schema(path)
    with pa.OSFile(str(target), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        for batch in packed_batches(path):
            writer.write_batch(batch)

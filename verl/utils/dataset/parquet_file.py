"""Parquet files with rows in any order, whatever their size.

Parquet is compressed in groups of up to a million rows, and reading one row means to unpack its
group. So a file is unpacked once: a small one into memory, a large one into an Arrow file in the
cache folder, which is memory-mapped; the machine keeps as much of it in memory as it has to spare.
"""

import hashlib
import logging
import os
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock

from verl.utils.dataset.tables import DEFAULT_CACHE, DataError, Row, RowFile

logger = logging.getLogger(__name__)

MAX_BYTES_IN_MEMORY = 64 << 20
BATCH_BYTES = 4 << 20
MAX_BATCH_ROWS = 1024
LOCK_TIMEOUT_SECONDS = 3600.0
UNREADABLE = (pa.ArrowException, OverflowError, ValueError)


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
            place
            for place, column in enumerate(batch.schema)
            if column.name in columns or not is_plain(column.type)
        ]
    )


def is_plain(kind: pa.DataType) -> bool:
    """Text, bytes, numbers, and what is built from them: every valid value is a Python value."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return is_plain(kind.value_type)
    if pa.types.is_struct(kind):
        return all(is_plain(kind.field(place).type) for place in range(kind.num_fields))
    tests = (
        pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary,
        pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_null,
    )  # fmt: skip
    return any(test(kind) for test in tests)


# ---- unpacking -----------------------------------------------------------------------------------

BatchAt = Callable[[int], pa.RecordBatch]


def unpacked(path: Path, folder: Path, max_bytes: int) -> tuple[BatchAt, list[int]]:
    """The rows in batches: how to get one, and how many rows each has."""
    target = cached_name(path, folder)
    if target.is_file():
        try:
            return mapped(target)
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
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.parent / ".arrow.lock", timeout=LOCK_TIMEOUT_SECONDS):
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


def write_arrow(target: Path, path: Path) -> None:
    schema = pq.read_schema(path)
    with pa.OSFile(str(target), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        for batch in packed_batches(path):
            writer.write_batch(batch)


def mapped(target: Path) -> tuple[BatchAt, list[int]]:
    reader = pa.ipc.open_file(pa.memory_map(str(target)))
    sizes = [reader.get_batch(place).num_rows for place in range(reader.num_record_batches)]
    return reader.get_batch, sizes


def cached_name(path: Path, folder: Path) -> Path:
    """A name that belongs to this file in its present state."""
    source = path.resolve()
    state = source.stat()
    whole = hashlib.sha256(str(source).encode()).hexdigest()[:24]
    version = hashlib.sha256(f"{state.st_size} {state.st_mtime_ns}".encode()).hexdigest()[:16]
    return folder / "arrow" / f"{whole}-{version}.arrow"

"""What happens to rows that cannot be used, and which rows come twice.

A bad row is named with its file, row and reason, and left out. A run starts when fewer than one row
in a hundred is bad; with more, something is wrong with the data as a whole, and it stops. Memory
stays bounded: the first bad rows are shown, and all of them stand in a report on disk.
"""

import hashlib
import logging
import tempfile
from array import array
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from verl.utils.dataset.tables import DEFAULT_CACHE, BadRow, DataError, RowTable
from verl.utils.py_functional import printable

logger = logging.getLogger(__name__)

MAX_BAD_SHARE = 0.01
MAX_SHOWN = 20

Fault = Callable[[Mapping[str, Any]], str | None]


def sound_rows(
    table: RowTable,
    fault: Fault,
    *,
    columns: Collection[str],
    prompt_key: str | None = None,
    cache_dir: str | None = None,
) -> RowTable:
    """The rows without a fault. `fault` is given at least `columns` of each row.

    With `prompt_key`, rows that repeat an earlier prompt or an earlier id are counted and reported.
    """
    sound = array("q")
    repeats = None if prompt_key is None else Repeats(prompt_key)
    with Quarantine(table, cache_dir) as quarantine:
        for number, row in enumerate(table.scan(columns)):
            if isinstance(row, BadRow):
                quarantine.add(row)
                continue
            reason = fault(row)
            if reason is not None:
                # The whole row says more about what is missing than the columns that were scanned.
                quarantine.add(table.bad(number, fault(table[number]) or reason))
                continue
            sound.append(number)
            if repeats is not None:
                repeats.add(row)
        quarantine.settle(quarantine.count + len(sound))
    if repeats is not None:
        repeats.report()
    return RowTable(table.files, np.array(sound, dtype=np.int64))


def settle_refused(
    table: RowTable,
    refused: np.ndarray,
    reason: Callable[[int], object],
    *,
    cache_dir: str | None = None,
) -> None:
    """The same for rows that turned out bad only when they were encoded."""
    with Quarantine(table, cache_dir) as quarantine:
        for item in map(int, refused):
            quarantine.add(table.bad(int(table.numbers[item]), reason(item)))
        quarantine.settle(len(table))


class Quarantine:
    """Bad rows: the first `MAX_SHOWN` in memory, every one in the report."""

    def __init__(self, table: RowTable, cache_dir: str | None) -> None:
        self._names = ", ".join(file.path for file in table.files)
        digest = hashlib.sha256(self._names.encode(errors="surrogateescape")).hexdigest()[:16]
        self._folder = Path(cache_dir or DEFAULT_CACHE).expanduser() / "bad_rows"
        self.report = self._folder / f"{digest}.txt"
        self._file: Any = None
        self.shown: list[BadRow] = []
        self.count = 0

    def __enter__(self) -> "Quarantine":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()
            Path(self._file.name).unlink(missing_ok=True)

    def add(self, bad: BadRow) -> None:
        self.count += 1
        if len(self.shown) < MAX_SHOWN:
            self.shown.append(bad)
        if self.count > MAX_SHOWN:
            self._write(bad)

    def settle(self, num_rows: int) -> None:
        """Log the bad rows, or stop when they are too many."""
        if not num_rows:
            raise DataError(f"there are no rows in {self._names}")
        shown = "\n".join(f"  {printable(bad, max_characters=300)}" for bad in self.shown)
        shown += self._publish()
        if self.count / num_rows >= MAX_BAD_SHARE:
            raise DataError(
                f"{self.count} of {num_rows} rows are bad; a run starts when fewer than "
                f"{MAX_BAD_SHARE:.0%} are:\n{shown}"
            )
        if self.count:
            logger.warning("%d of %d rows are left out:\n%s", self.count, num_rows, shown)

    def _write(self, bad: BadRow) -> None:
        if self._file is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.NamedTemporaryFile(  # noqa: SIM115, closed on exit
                "w", dir=self._folder, suffix=".partial", encoding="utf-8", delete=False
            )
            for earlier in self.shown:
                self._file.write(f"{printable(earlier, max_characters=1000)}\n")
        self._file.write(f"{printable(bad, max_characters=1000)}\n")

    def _publish(self) -> str:
        """Give the report its name, and say where it is."""
        if self._file is None:
            return ""
        self._file.close()
        Path(self._file.name).replace(self.report)
        return f"\n  and {self.count - len(self.shown)} more; {self.report} lists all of them"


class Repeats:
    """Counts rows that come again, at sixteen bytes per row."""

    def __init__(self, prompt_key: str) -> None:
        self.prompt_key = prompt_key
        self._prompts, self._ids = array("q"), array("q")

    def add(self, row: Mapping[str, Any]) -> None:
        self._prompts.append(hash(repr(row[self.prompt_key])))
        extra = row.get("extra_info")
        if isinstance(extra, dict) and extra.get("index") is not None:
            row_id = (row.get("data_source"), extra.get("split"), extra["index"])
            self._ids.append(hash(repr(row_id)))

    def report(self) -> None:
        for what, hashes in (("prompts", self._prompts), ("ids", self._ids)):
            repeated = num_repeated(hashes)
            if repeated:
                logger.warning("%d of %d %s repeat an earlier one", repeated, len(hashes), what)


def num_repeated(hashes: "array[int]") -> int:
    """How many entries equal another one that stands before them."""
    ordered = np.sort(np.array(hashes, dtype=np.int64))
    return int((ordered[1:] == ordered[:-1]).sum())

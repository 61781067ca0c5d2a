"""Rows that cannot be used: what is checked, which prompts fit, and what happens to the others.

A bad row is named with its file, row and reason, and left out. A run starts when fewer than one row
in a hundred is bad; with more, something is wrong with the data as a whole, and it stops. Memory
stays bounded: the first bad rows are shown, and all of them stand in a report on disk.

Checks ask for exactly `dict` and `list`, which is what JSON and Arrow give: that is several times
faster than asking for abstract types, and every message is asked. Prompts are measured in this
process or in several: the parent hands out ranges of rows and takes back one byte per row; a worker
that does not answer in time ends the measuring with an error.
"""

import hashlib
import logging
import math
import multiprocessing
import tempfile
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

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

    def __exit__(self, *_: object) -> None:
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


ANSWER_COLUMNS = ("ground_truth", "answer")
CHECKED_COLUMNS = ("reward_model", "extra_info", *ANSWER_COLUMNS)


def fault_of(row: Mapping[str, Any], prompt_key: str) -> str | None:
    """What is wrong with a row, or None."""
    if prompt_key not in row:
        return f"has no column {prompt_key!r} (data.prompt_key); its columns are {sorted(row)}"
    fault = prompt_fault(row[prompt_key])
    if fault is not None:
        return f"{prompt_key} {fault}"
    answer = ground_truth_of(row)
    if isinstance(answer, float) and math.isnan(answer):
        return "has NaN for an answer"
    for column in ("reward_model", "extra_info"):
        if row.get(column) is not None and not isinstance(row[column], dict):
            return f"{column} is {type(row[column]).__name__}, not a mapping"
    return None


def ground_truth_of(row: Mapping[str, Any]) -> Any:
    """The answer, from `reward_model.ground_truth` or a column of its own; None without one."""
    reward_model = row.get("reward_model")
    if isinstance(reward_model, dict) and reward_model.get("ground_truth") is not None:
        return reward_model["ground_truth"]
    return next((row[name] for name in ANSWER_COLUMNS if row.get(name) is not None), None)


def prompt_fault(prompt: Any) -> str | None:
    """What is wrong with a prompt: it is a text, or messages with a role and a content each."""
    if prompt is None:
        return "is null"
    if isinstance(prompt, str):
        return None if prompt else "is empty"
    if not isinstance(prompt, list):
        return f"is {type(prompt).__name__}; it must be a text or a list of messages"
    if not prompt:
        return "has no messages"
    for index, message in enumerate(prompt):
        fault = message_fault(message)
        if fault is not None:
            return f"message {index} {fault}"
    return None


def message_fault(message: Any) -> str | None:
    if not isinstance(message, dict) or "role" not in message or "content" not in message:
        return "is no mapping with role and content"
    if not isinstance(message["role"], str):
        return f"has a role that is {type(message['role']).__name__}, not text"
    content = message["content"]
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return None
    if isinstance(content, list):
        is_part = [isinstance(part, dict) for part in content]
        return None if all(is_part) else f"has part {is_part.index(False)} that is no mapping"
    return f"has content that is {type(content).__name__}, neither text nor a list of parts"


ROWS_PER_RANGE = 256
RANGE_TIMEOUT_SECONDS = 600.0


class Verdict(IntEnum):
    """What was found out about a prompt."""

    FITS = 0
    TOO_LONG = 1
    REFUSED = 2
    """The chat template or the processor does not take it."""


Measure = Callable[[int], Verdict]


def measured(measure: Measure, num_rows: int, *, num_workers: int) -> np.ndarray:
    """The verdict on every row, (num_rows,). `measure` travels to the workers by pickling."""
    starts = range(0, num_rows, ROWS_PER_RANGE)
    ranges = [(start, min(start + ROWS_PER_RANGE, num_rows)) for start in starts]
    found = np.zeros(num_rows, dtype=np.uint8)
    with tqdm(total=num_rows, desc="measuring prompts", unit=" prompts", disable=None) as bar:
        for (start, end), verdicts in zip(
            ranges, answers(measure, ranges, num_workers), strict=True
        ):
            found[start:end] = np.frombuffer(verdicts, dtype=np.uint8)
            bar.update(end - start)
    return found


def answers(measure: Measure, ranges: list[tuple[int, int]], num_workers: int) -> Iterator[bytes]:
    if num_workers <= 1 or len(ranges) <= 1:
        yield from (measure_range(measure, bounds) for bounds in ranges)
        return
    # A new interpreter per worker: this one may hold threads and devices that a fork would break.
    context = multiprocessing.get_context("spawn")
    with context.Pool(min(num_workers, len(ranges))) as pool:
        results = pool.imap(partial(measure_range, measure), ranges)
        for start, end in ranges:
            try:
                yield results.next(timeout=RANGE_TIMEOUT_SECONDS)
            except multiprocessing.TimeoutError as error:
                raise DataError(
                    f"prompts {start} to {end} were not measured within {RANGE_TIMEOUT_SECONDS:g} "
                    "seconds; set data.filter_overlong_prompts_workers=1 to measure them here"
                ) from error


def measure_range(measure: Measure, bounds: tuple[int, int]) -> bytes:
    return bytes(measure(row) for row in range(*bounds))

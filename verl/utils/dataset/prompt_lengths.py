"""Which prompts fit, measured in this process or in several.

The parent hands out ranges of rows and takes back one byte per row:

    parent: range(0, 256) ... -> queue -> worker: reopens the files, measures -> bytes -> parent

A worker that does not answer for a range in time ends the measuring with an error.
"""

import multiprocessing
from collections.abc import Callable, Iterator
from enum import IntEnum
from functools import partial

import numpy as np
from tqdm import tqdm

from verl.utils.dataset.tables import DataError

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

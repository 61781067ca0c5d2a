"""JSON Lines and JSON arrays, read a row at a time from a memory-mapped file.

The index is two numbers per row, where its text begins and ends. For JSON Lines it is found by
looking for line ends; an array is parsed once, one element after another, to find it.
"""

import json
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from verl.utils.dataset.tables import DataError, Row, RowFile

JSON_LINES = (".jsonl", ".ndjson")
SCANNED_BYTES = 16 << 20
NEW_LINE = ord("\n")
SPACES = np.frombuffer(b" \t\r\x0b\x0c", dtype=np.uint8)


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


def elements(text: str) -> Iterator[tuple[int, int]]:
    """(start, end) of each element of a JSON array, counted in bytes."""
    decoder = json.JSONDecoder()
    place = after_spaces(text, text.index("[") + 1)
    num_bytes, counted = 0, 0  # bytes of the text before character `counted`
    is_first = True
    while is_first or text[place : place + 1] == ",":
        if not is_first:
            place = after_spaces(text, place + 1)
        elif text[place : place + 1] == "]":
            break
        is_first = False
        _, end = decoder.raw_decode(text, place)
        num_bytes += len(text[counted:place].encode("utf-8"))
        start = num_bytes
        num_bytes += len(text[place:end].encode("utf-8"))
        counted = end
        yield start, num_bytes
        place = after_spaces(text, end)
    if text[place : place + 1] != "]" or text[place + 1 :].strip():
        raise ValueError(f"expected ',' or ']' at character {place}")


def after_spaces(text: str, place: int) -> int:
    while text[place : place + 1] in (" ", "\t", "\r", "\n"):
        place += 1
    return place


def is_unicode(value: Any) -> bool:
    """Whether every text inside can be written as UTF-8; JSON's escapes allow more."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True

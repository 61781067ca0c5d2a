"""The files of a journal: a line per reply, a file per step, written by a thread of its own.

    {"sum":"5be0a7a2","entry":{"run":"3f...","step":12,"phase":"train","uid":"12-3","sample":0,
     "number":0,"kind":"tool","request":{...},"reply":{...}}}
    {"sum":"...","entry":{..., "end":2,"digest":"..."}}       a trajectory of two replies has ended
    {"sum":"...","entry":{"run":"3f...","complete":12}}       the step was made to its end

The checksum is of the bytes of the entry. A line that a kill cut short has no end; it is removed
before others follow it.
"""

import asyncio
import json
import logging
import os
import re
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl.utils.checkpoint.layout import make_folders, write_all

logger = logging.getLogger(__name__)

MAX_STEP_BYTES = 4 << 30
MAX_PENDING_BYTES = 64 << 20
"""Bytes on their way to the disk; past them, trajectories wait."""

_STEP_FILE = re.compile(r"step_(\d{6,})\.jsonl")
_LINE = re.compile(rb'\{"sum":"([0-9a-f]{8})","entry":(.*)\}\n', re.DOTALL)

Entry = dict[str, Any]
Place = tuple[str, str, int]
"""Phase, uid and sample: which trajectory of a step."""


@dataclass(frozen=True)
class Recorded:
    """The replies of a trajectory by number, and the digest of what it became; None if it had not
    ended."""

    replies: dict[int, Entry]
    digest: str | None
    fault: str | None = None


@dataclass
class RecordedStep:
    """What the file of a step holds."""

    trajectories: dict[Place, Recorded] = field(default_factory=dict)
    unfinished: dict[Place, Recorded] = field(default_factory=dict)
    """What the last attempt at each trajectory had got."""

    is_complete: bool = False
    """The step was made to its end, so its faults of the world are part of what it computed."""

    num_bytes: int = 0
    """Of whole lines; what follows them was cut short."""

    damaged_lines: list[int] = field(default_factory=list)


def step_file(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}.jsonl"


def journalled_steps(folder: Path) -> dict[int, Path]:
    """The files of steps, by step."""
    names = {path: _STEP_FILE.fullmatch(path.name) for path in sorted(folder.glob("step_*.jsonl"))}
    return {int(name[1]): path for path, name in names.items() if name is not None}


def read_step(path: Path) -> RecordedStep:
    """The trajectories that ended, each with the replies of the attempt that ended last."""
    step = RecordedStep()
    attempts: dict[tuple[str, Place], dict[int, Entry]] = {}
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            step.num_bytes += len(line)
            entry = _checked(line)
            if entry is None:
                step.damaged_lines.append(number)
            elif "complete" in entry:
                step.is_complete = True
            else:
                place = (entry["phase"], entry["uid"], entry["sample"])
                replies = attempts.setdefault((entry["run"], place), {})
                if "end" not in entry:
                    replies[entry["number"]] = entry
                    step.unfinished[place] = Recorded(replies, None)
                elif replies.keys() == set(range(entry["end"])):
                    step.trajectories[place] = Recorded(replies, entry["digest"], entry["fault"])
    return step


def _checked(line: bytes) -> Entry | None:
    """The entry of a line; None if it is not what was written."""
    parts = _LINE.fullmatch(line)
    if parts is None or zlib.crc32(parts[2]) != int(parts[1], 16):
        return None
    return json.loads(parts[2])


class JournalFiles:
    """Appends lines off the event loop, in order. What the disk refuses is said once."""

    def __init__(self, folder: Path, *, is_read_only: bool = False) -> None:
        self.folder = folder
        self.is_read_only = is_read_only
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._counting = threading.Lock()
        self._num_pending = 0
        self._used: set[int] = set()
        self._num_written: dict[int, int] = {}
        self._refused: set[int] = set()
        self._is_closed = False

    async def load(self, step: int) -> RecordedStep:
        return await asyncio.wrap_future(self._thread.submit(self._load, step))

    def append(self, step: int, body: bytes, *, is_synced: bool = False) -> None:
        line = b'{"sum":"%08x","entry":%b}\n' % (zlib.crc32(body), body)
        if self._is_closed:  # by a run that has ended while its last trajectories were cancelled
            return
        with self._counting:
            self._used.add(step)
            self._num_pending += len(line)
        self._thread.submit(self._append, step, line, is_synced)

    def has(self, step: int) -> bool:
        """Whether something of a step was read or appended."""
        return step in self._used

    async def make_room(self) -> None:
        if self._num_pending > MAX_PENDING_BYTES:
            await self.written()

    async def written(self) -> None:
        """Wait until everything appended so far is in the files."""
        if self._num_pending:
            await asyncio.wrap_future(self._thread.submit(_nothing))

    def keep(self, name: str, content: bytes) -> None:
        """Write a file beside the steps, in place of an earlier one."""
        self._thread.submit(self._keep, name, content).result(timeout=None)

    def remove(self, last: int | None = None) -> None:
        """Remove the files of steps up to `last`, or all."""
        self._thread.submit(self._remove, last)

    def close(self) -> None:
        """Wait for what is to be written."""
        self._is_closed = True
        self._thread.shutdown(wait=True)

    def _load(self, step: int) -> RecordedStep:
        path = step_file(self.folder, step)
        if not path.exists():
            return RecordedStep()
        found = read_step(path)
        if found.damaged_lines:
            message = "%s: lines %s are damaged; their trajectories are asked for again"
            logger.warning(message, path, found.damaged_lines[:10])
        if found.num_bytes < path.stat().st_size and not self.is_read_only:
            os.truncate(path, found.num_bytes)
        self._used.add(step)
        self._num_written[step] = found.num_bytes
        return found

    def _append(self, step: int, line: bytes, is_synced: bool) -> None:
        with self._counting:
            self._num_pending -= len(line)
        path, size = step_file(self.folder, step), self._num_written.get(step, 0) + len(line)
        if step in self._refused:
            return
        try:
            if size > MAX_STEP_BYTES:
                raise OSError(f"it would have more than {MAX_STEP_BYTES} bytes")
            if step not in self._num_written:
                make_folders(self.folder)
            with open(path, "ab", buffering=0) as file:
                write_all(file, line)
                if is_synced:
                    os.fsync(file.fileno())
        except OSError as error:
            self._refused.add(step)
            message = "%s takes no more replies: %s. Training goes on; a resumed run asks again"
            logger.warning(message, path, error)
        else:
            self._num_written[step] = size

    def _keep(self, name: str, content: bytes) -> None:
        draft = self.folder / f".{name}.saving"
        try:
            make_folders(self.folder)
            draft.write_bytes(content)
            draft.replace(self.folder / name)
        except OSError as error:
            logger.warning("%s cannot be written: %s", self.folder / name, error)

    def _remove(self, last: int | None) -> None:
        for step, path in journalled_steps(self.folder).items():
            if last is None or step <= last:
                path.unlink(missing_ok=True)


def _nothing() -> None:
    """Ends when what came before has been written."""

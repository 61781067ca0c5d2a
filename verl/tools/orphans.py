"""A record of instances that hold something outside of the process, for whoever starts next.

Each set of tools appends to a file of its own, `tool-instances-*.jsonl`: a line when an instance is
about to be created, and a line when it has been released. It locks (`flock`) the file for as long
as it lives; the kernel drops the lock when the process ends, however that happens. So a file that
can be locked belongs to nobody, and the instances in it without a second line are orphans:
`start_reaping` gives them to `BaseTool.reap` when a run starts.
"""

import asyncio
import fcntl
import json
import logging
import os
import threading
import uuid
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from verl.tools.base_tool import BaseTool

if TYPE_CHECKING:
    from verl.tools.leases import ToolSet

logger = logging.getLogger(__name__)

NAME = "tool-instances-{}.jsonl"
MAX_REAPED_AT_ONCE = 32


@dataclass(frozen=True)
class Orphan:
    """An instance whose process is gone."""

    owner: str
    pid: int
    tool: str
    instance_id: str


class InstanceRecord:
    """The file of a set of tools; written by any thread, made at the first instance."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME.format(uuid.uuid4().hex)
        self._pid = os.getpid()
        self._num_held = 0
        self._file: int | None = None
        self._lock = threading.Lock()

    def created(self, owner: str, tool: str, instance_id: str) -> None:
        self._write({"event": "created", "owner": owner, "pid": self._pid}, tool, instance_id, 1)

    def released(self, tool: str, instance_id: str) -> None:
        self._write({"event": "released"}, tool, instance_id, -1)

    def _write(self, values: dict[str, object], tool: str, instance_id: str, held: int) -> None:
        line = json.dumps({**values, "tool": tool, "instance_id": instance_id}) + "\n"
        with self._lock:
            if self._file is None:
                self._file = self._open()
            os.write(self._file, line.encode())
            self._num_held += held

    def _open(self) -> int:
        """The file, locked before it has the name by which others find it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_name(f".{self.path.name}")
        file = os.open(draft, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            logger.warning(
                "%s cannot be locked (%s); see to it that one run at a time starts there, or it "
                "ends what tools of the others hold",
                self.path.parent,
                error.strerror,
            )
        draft.replace(self.path)
        _open_records.add(self)
        return file

    def close(self) -> None:
        """Without an instance that is still held the file has nothing to tell and is removed."""
        with self._lock:
            if self._file is not None:
                if self._num_held == 0:
                    self.path.unlink(missing_ok=True)
                self.leave()

    def leave(self) -> None:
        """Close the file; in a fork the parent's lock stays."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


_open_records: "weakref.WeakSet[InstanceRecord]" = weakref.WeakSet()


def _leave_locks_to_parent() -> None:
    for record in list(_open_records):
        record.leave()


os.register_at_fork(after_in_child=_leave_locks_to_parent)


@contextmanager
def abandoned(path: Path) -> Iterator[bool]:
    """Whether the file belongs to nobody; then it is locked meanwhile."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:  # its owner has just removed it
        yield False
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield path.exists()
    except OSError:
        yield False
    finally:
        os.close(file)


def unreleased(path: Path) -> list[Orphan]:
    """The instances without a line that they were released; a line cut short is the last one."""
    held: dict[tuple[str, str], Orphan] = {}
    with path.open(errors="replace") as lines:
        for line in lines:
            try:
                entry = json.loads(line)
            except ValueError:  # the process was killed as it wrote: nothing was created yet
                continue
            key = (entry["tool"], entry["instance_id"])
            if entry["event"] == "created":
                held[key] = Orphan(entry["owner"], entry["pid"], *key)
            else:
                held.pop(key, None)
    return list(held.values())


# ---- at the next start ---------------------------------------------------------------------------


@dataclass
class Reaped:
    """What became of the instances that killed processes left."""

    num_ended: int = 0
    left: list[str] = field(default_factory=list)
    """Those that could not be ended, each with the reason; the next start tries again."""


def start_reaping(tool_set: "ToolSet", folder: str | Path) -> "Future[Reaped]":
    """Begin to end what killed processes with records in `folder` left; it is logged when done."""
    return tool_set.keeper.start(_reap_all(tool_set, Path(folder)))


async def _reap_all(tool_set: "ToolSet", folder: Path) -> Reaped:
    report = Reaped()
    limit = asyncio.Semaphore(MAX_REAPED_AT_ONCE)
    for path in sorted(folder.glob(NAME.format("*"))):
        with abandoned(path) as is_abandoned:
            if is_abandoned:
                found = unreleased(path)
                faults = await asyncio.gather(*(_reap(tool_set, one, limit) for one in found))
                report.num_ended += faults.count(None)
                report.left += [fault for fault in faults if fault is not None]
                if not any(faults):
                    path.unlink()
    if report.num_ended:
        logger.warning(
            "ended %d instances of tools that a killed run had left (records in %s)",
            report.num_ended,
            folder,
        )
    for fault in report.left[:10]:
        logger.warning("an instance that a killed run had left is still there: %s", fault)
    return report


async def _reap(tool_set: "ToolSet", orphan: Orphan, limit: asyncio.Semaphore) -> str | None:
    """End one instance; why that did not work, or None."""
    tool = tool_set.tools.get(orphan.tool)
    what = f"{orphan.instance_id} of tool {orphan.tool!r}, taken by {orphan.owner!r}"
    if not isinstance(tool, BaseTool):
        return f"{what}: this run has no such tool"
    async with limit:
        try:
            work = partial(tool.reap, orphan.instance_id)
            await tool_set.run(tool.name, work, tool_set.timeout_of(tool))
        except Exception as error:
            return f"{what}: {error!r}"
    return None

"""A record of instances that hold something outside of the process, for whoever starts next.

Each process appends to a file of its own, `tool-instances-{pid}-{start}.jsonl`: a line when an
instance is about to be created, and a line when it has been released. A process that was killed
leaves instances without the second line; `orphans` finds them, and `BaseTool.reap` ends them. The
start time of the process tells it from a later one with the same number.
"""

import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

NAME = "tool-instances-{pid}-{start}.jsonl"


@dataclass(frozen=True)
class Orphan:
    """An instance whose process is gone."""

    owner: str
    pid: int
    tool: str
    instance_id: str


class InstanceRecord:
    """The file of this process; written by any thread, made at the first instance."""

    def __init__(self, folder: Path) -> None:
        pid = os.getpid()
        self.path = folder / NAME.format(pid=pid, start=start_of(pid))
        self._pid = pid
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
                self.path.parent.mkdir(parents=True, exist_ok=True)
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
                self._file = os.open(self.path, flags, 0o600)
            os.write(self._file, line.encode())
            self._num_held += held

    def close(self) -> None:
        """Without an instance that is still held the file has nothing to tell and is removed."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None
                if self._num_held == 0:
                    self.path.unlink(missing_ok=True)


def orphans(folder: str | Path) -> Iterator[tuple[Path, list[Orphan]]]:
    """Files of processes that are gone, with the instances they left; remove a file when done."""
    for path in sorted(Path(folder).glob(NAME.format(pid="*", start="*"))):
        pid, start = path.stem.removeprefix("tool-instances-").split("-", 1)
        if pid.isdigit() and start_of(int(pid)) != start:
            yield path, unreleased(path)


def unreleased(path: Path) -> list[Orphan]:
    """The instances without a line that they were released; a line cut short is the last one."""
    held: dict[tuple[str, str], Orphan] = {}
    for line in path.read_text(errors="replace").splitlines():
        try:
            entry = json.loads(line)
        except ValueError:  # the process was killed as it wrote: it had not created anything yet
            continue
        key = (entry["tool"], entry["instance_id"])
        if entry["event"] == "created":
            held[key] = Orphan(entry["owner"], entry["pid"], *key)
        else:
            held.pop(key, None)
    return list(held.values())


def start_of(pid: int) -> str:
    """When a process started, in ticks since boot; "gone" where there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "gone" if not is_alive(pid) else "unknown"
    fields = text.rpartition(")")[2].split()
    return "gone" if fields[0] in "ZX" else fields[19]


def is_alive(pid: int) -> bool:
    """Asked where there is no /proc."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True

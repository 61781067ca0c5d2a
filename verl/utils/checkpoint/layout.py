"""A checkpoint root on disk: its names, durable writes, and the errors of a save or a load.

    latest_checkpointed_iteration.txt      the step that a run continues from
    global_step_N/                         a committed step
    .global_step_N.saving-HOST-PID/        a save in progress, or what a killed one left
    .global_step_N.displaced/              a step while a second save of it takes its name
    .global_step_N.deleting/               a step that is being removed
    .run.lock                              held by the run that writes here

Only these names are ever moved or removed; whatever else lies in the root is the user's.

`write` and `rename` only change memory; `fsync` of the file and of the folder that names it make
the change survive a power failure. Every error carries the path it is about.
"""

import errno as errno_names
import fcntl
import json
import logging
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from verl.utils.environment import EndsTheRun, Misuse
from verl.utils.processes import num_oom_kills, resident_gib

logger = logging.getLogger(__name__)

TRACKER = "latest_checkpointed_iteration.txt"
STEP_FORMAT = "global_step_{}"
LOCK = ".run.lock"

_HOST = re.sub(r"[^A-Za-z0-9_]", "_", socket.gethostname())
_LEFTOVER = re.compile(
    r"\.global_step_(?P<step>[0-9]+)\."
    r"(?P<kind>saving|displaced|deleting)(?:-(?P<host>\w+)-(?P<pid>[0-9]+))?"
)


def step_folder(root: Path, step: int) -> Path:
    return root / STEP_FORMAT.format(step)


def saving_folder(root: Path, step: int) -> Path:
    return root / f".global_step_{step}.saving-{_HOST}-{os.getpid()}"


def displaced_folder(root: Path, step: int) -> Path:
    return root / f".global_step_{step}.displaced"


def draft_of(root: Path) -> Path:
    return root / f".{TRACKER}.saving"


def list_steps(root: Path, directory_format: str = STEP_FORMAT) -> dict[int, Path]:
    """Committed steps by number, oldest first; a displaced one counts until its name is taken."""
    steps: dict[int, Path] = {}
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        number = step_of(path.name, directory_format)
        if number is not None:
            steps[number] = path
    for number, path in _displaced(root):
        steps.setdefault(number, path)
    return dict(sorted(steps.items()))


def step_of(name: str, directory_format: str = STEP_FORMAT) -> int | None:
    """The step in a folder's name, or None for a name that is not ours."""
    before, _, after = directory_format.partition("{}")
    digits = name.removeprefix(before).removesuffix(after)
    if not (digits.isascii() and digits.isdigit() and len(digits) < 19):
        return None
    return int(digits) if directory_format.format(int(digits)) == name else None


def remove_step(folder: Path) -> None:
    """Delete a committed step: its name first, so that no half of it is ever found under it."""
    doomed = folder.parent / f".{folder.name}.deleting"
    if doomed.exists():
        shutil.rmtree(doomed)
    os.rename(folder, doomed)
    shutil.rmtree(doomed)


def restore_displaced(root: Path) -> None:
    """Give a step its name back that a killed save had moved aside."""
    for step, path in _displaced(root):
        if not step_folder(root, step).exists():
            os.rename(path, step_folder(root, step))


def remove_leftovers(root: Path) -> None:
    """Delete what dead runs left behind, never what a live process on this host is writing."""
    for path in root.iterdir():
        found = _LEFTOVER.fullmatch(path.name)
        if found and not _has_live_owner(found):
            remove_quietly(path)
    draft_of(root).unlink(missing_ok=True)


def remove_quietly(folder: Path) -> None:
    """Delete a folder if it is there. One that resists is left to the next save: it must not hide
    how this one ended."""
    try:
        if folder.exists():
            shutil.rmtree(folder)
    except OSError as error:
        logger.warning("could not remove %s: %s; the next save will try again", folder, error)


def _displaced(root: Path) -> Iterator[tuple[int, Path]]:
    for path in root.iterdir() if root.is_dir() else []:
        found = _LEFTOVER.fullmatch(path.name)
        if found and found["kind"] == "displaced":
            yield int(found["step"]), path


def _has_live_owner(leftover: re.Match[str]) -> bool:
    if leftover["pid"] is None or leftover["host"] != _HOST:
        return False
    process = int(leftover["pid"])
    return process != os.getpid() and _is_alive(process)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is there and belongs to somebody else
        return True
    return True


_OS_ERROR_IN_TEXT = re.compile(r"\(os error (\d+)\)")


class CheckpointError(EndsTheRun):
    """Base of everything here. Travels between processes: it is rebuilt from its `arguments`."""

    arguments: tuple[object, ...] = ()

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), self.arguments


class CheckpointSaveError(CheckpointError):
    """The disk refused a save. The earlier checkpoints are as they were and training can go on."""

    def __init__(self, step: int, cause: OSError, root: Path, free_bytes: int | None) -> None:
        self.arguments = (step, cause, root, free_bytes)
        self.step = step
        self.errno = cause.errno
        self.filename = str(cause.filename or root)
        self.free_bytes = free_bytes
        name = errno_names.errorcode.get(cause.errno or 0, "unknown")
        free = "unknown" if free_bytes is None else f"{free_bytes / 1e6:.1f} MB"
        super().__init__(
            f"step {step} was not saved: {self.filename}: {cause.strerror} ({name}); free space in "
            f"{root}: {free}. Earlier checkpoints are untouched. Free some space, lower "
            "trainer.max_actor_ckpt_to_keep or move trainer.default_local_dir"
        )


class CheckpointUploadError(CheckpointError):
    """A committed step could not be copied to the remote folder; here it is whole."""

    def __init__(self, folder: Path, remote: str, reason: str) -> None:
        self.arguments = (folder, remote, reason)
        self.folder = folder
        super().__init__(
            f"{folder} is committed, but could not be copied to {remote}: {reason}. Copy it "
            "yourself, or mend trainer.default_hdfs_dir; the next step is copied anyway"
        )


class CheckpointCorruptError(CheckpointError):
    """A checkpoint is not what its manifest says; nothing of it was used."""

    def __init__(self, path: Path, problems: list[str]) -> None:
        self.arguments = (path, problems)
        self.path = path
        self.problems = problems
        super().__init__(f"{path} cannot be trusted: {'; '.join(problems)}")


class Skipped(NamedTuple):
    """A step that was passed over (None: the tracker file itself) and why."""

    step: int | None
    reason: str


class NoIntactCheckpointError(CheckpointError):
    """There are checkpoints, or there were, and none can be used. No reason to start afresh."""

    def __init__(self, root: Path, skipped: list[Skipped]) -> None:
        self.arguments = (root, skipped)
        self.root = root
        self.skipped = skipped
        lines = "".join(f"\n  step {step}: {reason}" for step, reason in skipped)
        super().__init__(
            f"no intact checkpoint in {root}:{lines}\nRestore one of them, or start from the "
            "beginning on purpose with trainer.resume_mode=disable or another "
            "trainer.default_local_dir"
        )


class CheckpointMismatchError(CheckpointError):
    """An intact checkpoint belongs to another model, dataset or configuration."""

    exit_code = 2

    def __init__(self, path: Path, differences: list[str]) -> None:
        self.arguments = (path, differences)
        self.path = path
        self.differences = differences
        lines = "".join(f"\n  {difference}" for difference in differences)
        parts = [difference.split() for difference in differences]
        changed = dict.fromkeys(key if part == "config:" else part[:-1] for part, key, *_ in parts)
        super().__init__(
            f"{path} was saved by a different run:{lines}\nUndo these changes, start a new run "
            "with another trainer.default_local_dir, or continue all the same with "
            f"trainer.resume_may_change=[{','.join(changed)}]"
        )


def as_os_error(error: Exception) -> OSError | None:
    """The operating system's refusal inside an error, also where a Rust library put it in words."""
    if isinstance(error, OSError):
        return error if error.errno is not None else None
    found = _OS_ERROR_IN_TEXT.search(str(error))
    return OSError(int(found[1]), str(error)) if found else None


CHUNK_BYTES = 16 << 20


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Raise what the system refused as an `OSError` that says which file or folder it is about."""
    try:
        yield
    except Exception as error:
        refusal = as_os_error(error)
        if refusal is None:
            raise
        if refusal.filename is None:
            refusal.filename = str(path)
        if refusal is error:
            raise
        raise refusal from error


def write_all(file: FileIO, octets: bytes | memoryview) -> None:
    """Write everything; one call may accept only part of it."""
    rest = memoryview(octets)
    while rest:
        rest = rest[file.write(rest[:CHUNK_BYTES]) :]


def write_durably(path: Path, octets: bytes) -> None:
    """Create or replace the file at `path` and sync it; its name is synced by `sync_folder`."""
    with naming(path), open(path, "wb", buffering=0) as file:
        write_all(file, octets)
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Make the names in a folder last."""
    with naming(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def make_folders(path: Path) -> None:
    """Create a folder and its missing parents, each entered durably into the one above."""
    if path.is_dir():
        return
    make_folders(path.parent)
    path.mkdir(exist_ok=True)
    sync_folder(path.parent)


# ---- one run per folder --------------------------------------------------------------------------


class FolderInUse(Misuse, RuntimeError):
    """Another run writes to a folder of this one."""


class FolderNotWritable(Misuse, OSError):
    """A run could write nothing of what it was told to keep."""


RECORD_BYTES = 512


@dataclass
class Holder:
    """What a lock file says of the run that holds it.

    A run that ends, also by an error, takes its record back. A record that nobody holds is of a run
    that could not: it was killed.
    """

    process: int
    host: str
    since: str
    num_oom_kills: int
    """Of the whole machine, when the run began."""
    phase: str = "its start"
    memory_gib: float = 0.0

    @classmethod
    def this_process(cls) -> "Holder":
        began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        return cls(os.getpid(), socket.gethostname(), began, num_oom_kills())

    @classmethod
    def read(cls, descriptor: int) -> "Holder | None":
        try:
            return cls(**json.loads(os.pread(descriptor, RECORD_BYTES, 0)))
        except (ValueError, TypeError):  # blank, or of another version
            return None

    def write(self, descriptor: int) -> None:
        write_record(descriptor, json.dumps(asdict(self)))

    def __str__(self) -> str:
        return f"process {self.process} on {self.host} since {self.since}"

    def crash_report(self) -> str:
        num_killed = num_oom_kills() - self.num_oom_kills
        if self.host == socket.gethostname() and num_killed > 0:
            cause = (
                f"the kernel has killed {num_killed} processes of this machine since then because "
                "memory ran out; trainer.dry_run=True estimates what a run needs"
            )
        else:
            cause = "it was killed (kill -9), crashed, or its machine went down"
        return (
            f"the last run here, {self}, did not shut down: it died in {self.phase}, with "
            f"{self.memory_gib:.1f} GiB resident; {cause}"
        )


def write_record(descriptor: int, text: str) -> None:
    """In place and of one size, so that a full disk has room for the next one."""
    with suppress(OSError):  # a run does not end for want of its crash report
        os.pwrite(descriptor, text.ljust(RECORD_BYTES).encode(), 0)


@dataclass
class Hold:
    """A lock that this process holds, and how often."""

    descriptor: int
    holder: Holder
    count: int = 0


_held: dict[Path, Hold] = {}


def note_phase(phase: str) -> None:
    """Record the run's phase and memory in its locks, for the crash report of the next start."""
    for hold in _held.values():
        hold.holder.phase, hold.holder.memory_gib = phase, resident_gib()
        hold.holder.write(hold.descriptor)


@contextmanager
def holding(locks: Mapping[str, Path]) -> Iterator[None]:
    """Keep folders to this process; `locks` are files in them, by the option to change instead.

    The kernel drops the locks when the process ends, however that happens, and no child inherits
    them. Holding what this process holds already is nothing new. Where the file system has no
    locks, or is full, a warning says so and the run goes on. A folder that cannot be written is
    refused before anything is computed for it.
    """
    crashes: dict[int, str] = {}  # by process: one may have held several of them
    with ExitStack() as stack:
        for option, lock in locks.items():
            stack.enter_context(_holding(option, lock, crashes))
        for report in crashes.values():
            logger.warning("%s", report)
        yield


@contextmanager
def _holding(option: str, path: Path, crashes: dict[int, str]) -> Iterator[None]:
    path = path.expanduser().absolute()
    if path not in _held:
        _held[path] = Hold(_lock(option, path, crashes), Holder.this_process())
        _held[path].holder.write(_held[path].descriptor)
    _held[path].count += 1
    try:
        yield
    finally:
        if path in _held:  # not in a fork of the run
            _held[path].count -= 1
            if not _held[path].count:
                descriptor = _held.pop(path).descriptor
                write_record(descriptor, "")
                os.close(descriptor)


def _lock(option: str, path: Path, crashes: dict[int, str]) -> int:
    try:
        make_folders(path.parent)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        if error.errno not in (errno_names.ENOSPC, errno_names.EDQUOT):
            raise FolderNotWritable(
                f"{option} is {path.parent}, which cannot be written: {error.strerror} "
                f"({error.filename}); set another {option}"
            ) from error
        logger.warning("%s (%s) cannot be locked: %s", option, path.parent, error)
        return os.open(os.devnull, os.O_WRONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = Holder.read(descriptor)
        os.close(descriptor)
        raise FolderInUse(
            f"{path.parent} ({option}) is in use by another run: {holder or 'it does not say who'}."
            " Two runs would overwrite each other's files; end that run, wait for it, or set "
            f"another {option}"
        ) from error
    except OSError as error:
        logger.warning(
            "%s (%s) cannot be locked, its file system has no locks (%s); see to it that no other "
            "run writes there",
            option,
            path.parent,
            error.strerror,
        )
        return descriptor
    dead = Holder.read(descriptor)
    if dead is not None:
        crashes[dead.process] = dead.crash_report()
    return descriptor


def _leave_locks_to_parent() -> None:
    for hold in _held.values():
        os.close(hold.descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_leave_locks_to_parent)

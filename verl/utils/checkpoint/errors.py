"""What can go wrong with a checkpoint, one type each, so that a caller can decide what to do."""

import errno as errno_names
import re
from pathlib import Path
from typing import NamedTuple

_OS_ERROR_IN_TEXT = re.compile(r"\(os error (\d+)\)")


class CheckpointError(Exception):
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

    def __init__(self, path: Path, differences: list[str]) -> None:
        self.arguments = (path, differences)
        self.path = path
        self.differences = differences
        lines = "".join(f"\n  {difference}" for difference in differences)
        super().__init__(
            f"{path} was saved by a different run:{lines}\nUndo these changes, or start a new run "
            "with another trainer.default_local_dir"
        )


def as_os_error(error: Exception) -> OSError | None:
    """The operating system's refusal inside an error, also where a Rust library put it in words."""
    if isinstance(error, OSError):
        return error if error.errno is not None else None
    found = _OS_ERROR_IN_TEXT.search(str(error))
    return OSError(int(found[1]), str(error)) if found else None

"""Names inside a checkpoint root.

    latest_checkpointed_iteration.txt      the step that a run continues from
    global_step_N/                         a committed step
    .global_step_N.saving-HOST-PID/        a save under way, or what a killed one left
    .global_step_N.displaced/              a step while a second save of it takes its name
    .global_step_N.deleting/               a step that is being removed

Only these names are ever moved or removed; whatever else lies in the root is the user's.
"""

import logging
import os
import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

TRACKER = "latest_checkpointed_iteration.txt"
STEP_FORMAT = "global_step_{}"

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

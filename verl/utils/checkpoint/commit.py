"""Saving a step so that it is either there, whole, or not there at all.

    write files under a temporary name -> sync and hash each -> manifest -> sync folders
    -> rename to global_step_N -> sync the root -> replace the tracker file -> sync the root

A kill at any point leaves the tracker naming a whole step. An error of the disk undoes the save and
becomes a `CheckpointSaveError`; the run can go on and try again later. Once `staged_step` has ended
without an error, the caller may tell the user that the step is committed.
"""

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verl.utils.checkpoint.layout import (
    TRACKER,
    CheckpointSaveError,
    as_os_error,
    displaced_folder,
    draft_of,
    make_folders,
    remove_leftovers,
    remove_quietly,
    restore_displaced,
    saving_folder,
    step_folder,
    sync_folder,
    write_durably,
)
from verl.utils.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    in_threads,
    open_plain_file,
    record_file,
    walk,
)


@contextmanager
def staged_step(root: str | Path, step: int, *, fingerprint: dict[str, Any]) -> Iterator[Path]:
    """A folder to fill; when the block ends, `root/global_step_{step}` holds it and is committed.

    `fingerprint` is stored with it: JSON values that say which run this is. If the block or the
    commit fails, the folder is removed and earlier steps are as they were; what the disk refused
    is raised as `CheckpointSaveError`.
    """
    if step < 0:
        raise ValueError(f"a checkpoint's step is {step}; it must be 0 or more")
    root = Path(root)
    staging = saving_folder(root, step)
    try:
        _prepare(root, staging)
        yield staging
        seal(staging, step, fingerprint)
        publish(staging, root, step)
    except Exception as error:
        remove_quietly(staging)
        refusal = as_os_error(error)
        if refusal is None:
            raise
        raise CheckpointSaveError(step, refusal, root, free_bytes(root)) from error
    except BaseException:
        remove_quietly(staging)
        raise
    remove_quietly(displaced_folder(root, step))


def seal(staging: Path, step: int, fingerprint: dict[str, Any]) -> None:
    """Sync every file and folder in `staging` and list the files in a manifest."""
    found = dict(walk(staging))
    for name, status in found.items():
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{staging / name} is not a plain file; a checkpoint holds no links")
    num_bytes = sum(status.st_size for status in found.values())
    records = in_threads(lambda name: record_file(staging / name, sync=True), found, num_bytes)
    files = dict(zip(found, records, strict=True))
    manifest = Manifest(step=step, files=files, fingerprint=fingerprint)
    write_durably(staging / MANIFEST, manifest.to_text().encode())
    for folder, _, _ in os.walk(staging, topdown=False):
        sync_folder(Path(folder))


def publish(staging: Path, root: Path, step: int) -> None:
    """Give a sealed folder its final name and let the tracker file name it.

    Until the tracker does, an error takes everything back.
    """
    final, displaced, draft = step_folder(root, step), displaced_folder(root, step), draft_of(root)
    try:
        if final.exists():
            os.rename(final, displaced)
        os.rename(staging, final)
        sync_folder(root)
        write_durably(draft, str(step).encode())
        os.replace(draft, root / TRACKER)
    except BaseException:
        draft.unlink(missing_ok=True)
        _take_back(staging, final, displaced)
        raise
    sync_folder(root)


def read_tracker_text(root: Path) -> str | None:
    """What the tracker file says, at most its first 64 bytes; None without one."""
    try:
        with open_plain_file(root / TRACKER) as file:
            return file.read(64).decode("ascii", "replace").strip()
    except FileNotFoundError:
        return None


def free_bytes(root: Path) -> int | None:
    try:
        return shutil.disk_usage(root).free
    except OSError:
        return None


def _prepare(root: Path, staging: Path) -> None:
    make_folders(root)
    restore_displaced(root)
    remove_leftovers(root)
    staging.mkdir()


def _take_back(staging: Path, final: Path, displaced: Path) -> None:
    if final.exists() and not staging.exists():
        os.rename(final, staging)
    if displaced.exists():
        os.rename(displaced, final)

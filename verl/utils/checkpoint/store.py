"""The checkpoints of one run: save a step, keep the newest few, find the one to continue from.

    store = CheckpointStore(root, fingerprint=..., num_to_keep=2)
    found = store.resume()                      # None for a new run
    ...
    with store.saving(step) as folder:          # CheckpointSaveError: go on, nothing was lost
        save_state(folder, "data", loader_state)
    print(f"COMMITTED step={step}")

A step is either there, whole, or not there at all:

    write files under a temporary name -> sync and hash each -> manifest -> sync folders
    -> rename to global_step_N -> sync the root -> replace the tracker file -> sync the root

A kill at any point leaves the tracker naming a whole step. A disk error undoes the save; the run
can go on and try again later. An old step is deleted only after a newer one is committed, and only
if this run saved or continued it: another run's checkpoints in the same root are left alone.

The tracker file names the step to continue from: the last one acknowledged, or the one a user set
it back to by hand. If that step is damaged, the newest intact one before it serves, and if there is
none, one after it; every step passed over is reported with the reason. An empty root means a new
run; a root where nothing is intact is an error, never a quiet start from scratch.
"""

import logging
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.utils.checkpoint.layout import (
    STEP_FORMAT,
    TRACKER,
    CheckpointCorruptError,
    CheckpointMismatchError,
    CheckpointSaveError,
    NoIntactCheckpointError,
    Skipped,
    as_os_error,
    displaced_folder,
    draft_of,
    list_steps,
    make_folders,
    remove_leftovers,
    remove_quietly,
    remove_step,
    restore_displaced,
    saving_folder,
    step_folder,
    step_of,
    sync_folder,
    write_durably,
)
from verl.utils.checkpoint.manifest import (
    MANIFEST,
    MAY_CHANGE,
    Manifest,
    compare,
    in_threads,
    open_plain_file,
    record_file,
    verify_listing,
    verify_step,
    walk,
)

logger = logging.getLogger(__name__)


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


@dataclass(frozen=True, kw_only=True)
class IntactStep:
    """A step whose every byte was verified."""

    step: int
    path: Path
    manifest: Manifest
    skipped: list[Skipped]
    """What was passed over on the way to it."""


def _tracked_step(root: Path, skipped: dict[int | None, str]) -> int | None:
    """The step that the tracker names; one that cannot be read is noted in `skipped`."""
    try:
        text = read_tracker_text(root)
    except OSError as error:
        skipped[None] = f"{TRACKER} cannot be read: {error.strerror}"
        return None
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        skipped[None] = f"{TRACKER} holds {text!r} instead of a step"
        return None
    return int(text)


def _judge_by_tracker(steps: dict[int, Path], tracked: int, skipped: dict[int | None, str]) -> None:
    if tracked not in steps:
        skipped[tracked] = f"{TRACKER} names it, but its folder is missing"
    for step in reversed(steps):
        if step > tracked:
            skipped[step] = f"{TRACKER} says {tracked}: never acknowledged, or set back by hand"


def _by_preference(steps: dict[int, Path], tracked: int | None) -> list[int]:
    """Newest first, but what is newer than the tracker last."""
    newest_first = list(reversed(steps))
    if tracked is None:
        return newest_first
    return sorted(newest_first, key=lambda step: step > tracked)


def _log(root: Path, step: int, skipped: list[Skipped]) -> None:
    for passed, reason in skipped:
        logger.warning("%s: passing over step %s: %s", root, passed, reason)
    logger.info("%s: continuing from step %d, verified", root, step)


class CheckpointStore:
    def __init__(
        self,
        root: str | Path,
        *,
        fingerprint: dict[str, Any],
        num_to_keep: int | None = None,
        may_change: Sequence[str] = MAY_CHANGE,
        accepted: Sequence[str] = (),
    ) -> None:
        """`num_to_keep` counts steps; None keeps all. The last two: see `manifest.compare`."""
        if num_to_keep is not None and num_to_keep < 1:
            raise ValueError(
                f"num_to_keep is {num_to_keep}; it must be at least 1, or None for all"
            )
        self.root = Path(root)
        self.fingerprint = fingerprint
        self.num_to_keep = num_to_keep
        self.may_change = may_change
        self.accepted = accepted
        self._own_steps: list[int] = []  # oldest first

    def resume(self, path: str | Path | None = None) -> IntactStep | None:
        """The step to continue from, verified and of this run: `path`, or what the root offers."""
        found = find_intact(self.root) if path is None else intact_step_at(path)
        if found is None:
            return None
        saved, now, may_change = found.manifest.fingerprint, self.fingerprint, self.may_change
        differences = compare(saved, now, may_change=may_change, accepted=self.accepted)
        if differences:
            raise CheckpointMismatchError(found.path, differences)
        for difference in compare(saved, now, may_change=may_change):
            logger.warning("continuing although a change was made: %s", difference)
        if found.path.parent.resolve() == self.root.resolve():
            self._own_steps = [step for step in list_steps(self.root) if step <= found.step]
        return found

    @contextmanager
    def saving(self, step: int) -> Iterator[Path]:
        """A folder to fill; committed as `global_step_{step}` when the block ends."""
        try:
            with staged_step(self.root, step, fingerprint=self.fingerprint) as folder:
                yield folder
        finally:
            # The very last sync may fail with the step in place: it is ours to delete later.
            if step_folder(self.root, step).exists():
                self._own_steps = [own for own in self._own_steps if own != step] + [step]
        self._prune()

    def _prune(self) -> None:
        newest = step_folder(self.root, self._own_steps[-1])
        if self.num_to_keep is None or not _is_listed(newest):
            return
        while len(self._own_steps) > self.num_to_keep:
            folder = step_folder(self.root, self._own_steps.pop(0))
            try:
                if folder.exists():
                    remove_step(folder)
            except OSError as error:
                logger.warning("could not delete the old checkpoint %s: %s", folder, error)


def intact_step_at(path: str | Path) -> IntactStep:
    """A step that the user names by its folder, verified."""
    folder = Path(path).expanduser()
    step = step_of(folder.name)
    if step is None:
        raise ValueError(
            f"{path} is not the folder of a step; it must end in global_step_N, for example "
            f"{folder / 'global_step_10'}"
        )
    manifest = verify_step(folder, step=step)
    return IntactStep(step=step, path=folder, manifest=manifest, skipped=[])


def steps_to_keep(limits: Sequence[int | None]) -> int | None:
    """Whole steps to keep when each role says how many it wants: the most; None keeps all.

    A step is only usable with all its roles, so none is deleted before every role may let it go.
    """
    if not limits or None in limits:
        return None
    return max(limit for limit in limits if limit is not None)


def _is_listed(folder: Path) -> bool:
    try:
        verify_listing(folder)
    except CheckpointCorruptError as error:
        logger.warning("keeping older checkpoints, because %s", error)
        return False
    return True


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


def read_tracker_text(root: Path) -> str | None:
    """What the tracker file says, at most its first 64 bytes; None without one."""
    try:
        with open_plain_file(root / TRACKER) as file:
            return file.read(64).decode("ascii", "replace").strip()
    except FileNotFoundError:
        return None


def _take_back(staging: Path, final: Path, displaced: Path) -> None:
    if final.exists() and not staging.exists():
        os.rename(final, staging)
    if displaced.exists():
        os.rename(displaced, final)


def find_intact(root: str | Path, directory_format: str = STEP_FORMAT) -> IntactStep | None:
    """The step to continue from, verified; None if `root` has never held one.

    Raises `NoIntactCheckpointError` when there are steps, or a tracker that names one, but none is
    intact.
    """
    root = Path(root)
    steps = list_steps(root, directory_format)
    skipped: dict[int | None, str] = {}
    tracked = _tracked_step(root, skipped)
    if tracked is not None:
        _judge_by_tracker(steps, tracked, skipped)
    for step in _by_preference(steps, tracked):
        try:
            manifest = verify_step(steps[step], step=step)
        except CheckpointCorruptError as error:
            skipped[step] = "; ".join(error.problems)
            continue
        skipped.pop(step, None)
        report = [Skipped(*item) for item in skipped.items()]
        _log(root, step, report)
        return IntactStep(step=step, path=steps[step], manifest=manifest, skipped=report)
    if skipped:
        raise NoIntactCheckpointError(root, [Skipped(*item) for item in skipped.items()])
    return None

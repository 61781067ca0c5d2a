"""The checkpoints of one run: save a step, keep the newest few, find the one to continue from.

    store = CheckpointStore(root, fingerprint=..., num_to_keep=2)
    found = store.resume()                      # None for a new run
    ...
    with store.saving(step) as folder:          # CheckpointSaveError: go on, nothing was lost
        save_state(folder, "data", loader_state)
    print(f"COMMITTED step={step}")

An old step is deleted only after a newer one is committed, whole steps at a time, and only steps
that this run saved or continued: another run's checkpoints in the same root are left alone.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verl.utils.checkpoint.identity import MAY_CHANGE, compare
from verl.utils.checkpoint.layout import (
    CheckpointCorruptError,
    CheckpointMismatchError,
    list_steps,
    remove_step,
    step_folder,
    step_of,
)
from verl.utils.checkpoint.manifest import verify_listing, verify_step
from verl.utils.checkpoint.store import IntactStep, find_intact, staged_step

logger = logging.getLogger(__name__)


class CheckpointStore:
    def __init__(
        self,
        root: str | Path,
        *,
        fingerprint: dict[str, Any],
        num_to_keep: int | None = None,
        may_change: Sequence[str] = MAY_CHANGE,
    ) -> None:
        """`num_to_keep` counts steps; None keeps all. `may_change`: see `identity.compare`."""
        if num_to_keep is not None and num_to_keep < 1:
            raise ValueError(
                f"num_to_keep is {num_to_keep}; it must be at least 1, or None for all"
            )
        self.root = Path(root)
        self.fingerprint = fingerprint
        self.num_to_keep = num_to_keep
        self.may_change = may_change
        self._own_steps: list[int] = []  # oldest first

    def resume(self, path: str | Path | None = None) -> IntactStep | None:
        """The step to continue from, verified and of this run: `path`, or what the root offers."""
        found = find_intact(self.root) if path is None else intact_step_at(path)
        if found is None:
            return None
        differences = compare(
            found.manifest.fingerprint, self.fingerprint, may_change=self.may_change
        )
        if differences:
            raise CheckpointMismatchError(found.path, differences)
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

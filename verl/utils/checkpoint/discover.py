"""From which step a run continues.

The tracker file decides: the step it names is the last one that was acknowledged, or the one a
user set it back to by hand. If that step is damaged, the newest intact one before it serves, and if
there is none, one after it. Every step that is passed over is reported with the reason. An empty
root means a new run; a root where nothing is intact is an error, never a quiet start from scratch.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

from verl.utils.checkpoint.layout import (
    STEP_FORMAT,
    TRACKER,
    CheckpointCorruptError,
    NoIntactCheckpointError,
    Skipped,
    list_steps,
)
from verl.utils.checkpoint.manifest import Manifest, verify_step
from verl.utils.checkpoint.store import read_tracker_text

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class IntactStep:
    """A step whose every byte was verified."""

    step: int
    path: Path
    manifest: Manifest
    skipped: list[Skipped]
    """What was passed over on the way to it."""


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

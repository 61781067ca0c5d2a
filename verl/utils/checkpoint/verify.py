"""Whether a step's folder is exactly what was committed.

Cheap checks first: the manifest, then names and sizes, then the headers of tensor files, and only
then every byte. Nothing from the folder is used before all of it has passed.
"""

import stat
from collections.abc import Iterator
from os import stat_result
from pathlib import Path

from verl.utils.checkpoint.layout import CheckpointCorruptError
from verl.utils.checkpoint.manifest import (
    MANIFEST,
    FileRecord,
    Manifest,
    in_threads,
    read_manifest,
    record_file,
    walk,
)
from verl.utils.checkpoint.safetensors_file import read_header

PICKLE_SUFFIXES = {".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth"}
MAX_PROBLEMS = 8


def verify_step(folder: str | Path, *, step: int | None = None) -> Manifest:
    """The manifest of `folder`, after each of its bytes was compared with it.

    Raises `CheckpointCorruptError` that names each file which is missing, foreign, cut short or
    changed. With `step` the folder must also be of that step.
    """
    folder = Path(folder)
    manifest = verify_listing(folder, step=step)
    files = manifest.files
    num_bytes = sum(record.size for record in files.values())
    _raise_if_any(
        folder, in_threads(lambda item: _content_problem(folder, *item), files.items(), num_bytes)
    )
    return manifest


def verify_listing(folder: Path, *, step: int | None = None) -> Manifest:
    """Everything but the bytes: manifest, names, kinds, sizes, headers."""
    if folder.is_symlink() or not folder.is_dir():
        raise CheckpointCorruptError(folder, ["not a folder (a link is not followed)"])
    manifest = read_manifest(folder)
    if step is not None and manifest.step != step:
        raise CheckpointCorruptError(folder, [f"{MANIFEST} says it is step {manifest.step}"])
    try:
        found = dict(walk(folder))
    except OSError as error:
        raise CheckpointCorruptError(folder, [f"cannot be listed: {error}"]) from error
    found.pop(MANIFEST)
    _raise_if_any(folder, list(_listing_problems(manifest.files, found)))
    _raise_if_any(folder, [_header_problem(folder, name) for name in manifest.files])
    return manifest


def _listing_problems(
    expected: dict[str, FileRecord], found: dict[str, stat_result]
) -> Iterator[str]:
    for name in sorted(expected.keys() - found.keys()):
        yield f"{name} is missing"
    for name in sorted(found.keys() - expected.keys()):
        yield f"{name} is not in the manifest"
    for name in sorted(expected.keys() & found.keys()):
        size = found[name].st_size
        if not stat.S_ISREG(found[name].st_mode):
            yield f"{name} is a link or a device, not a plain file"
        elif size != expected[name].size:
            yield f"{name} has {size} bytes instead of {expected[name].size}"
        elif Path(name).suffix in PICKLE_SUFFIXES:
            yield f"{name} is of a kind that can hold code; a checkpoint has only data"


def _header_problem(folder: Path, name: str) -> str | None:
    if not name.endswith(".safetensors"):
        return None
    try:
        read_header(folder / name)
    except CheckpointCorruptError as error:
        return f"{name}: {'; '.join(error.problems)}"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    return None


def _content_problem(folder: Path, name: str, expected: FileRecord) -> str | None:
    try:
        found = record_file(folder / name)
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    return None if found == expected else f"{name} was changed: its hash is not the manifest's"


def _raise_if_any(folder: Path, problems: list[str | None] | list[str]) -> None:
    real = [problem for problem in problems if problem is not None]
    if len(real) > MAX_PROBLEMS:
        real = [*real[:MAX_PROBLEMS], f"and {len(real) - MAX_PROBLEMS} more"]
    if real:
        raise CheckpointCorruptError(folder, real)

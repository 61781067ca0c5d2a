"""The list of a checkpoint's files with their sizes and hashes, and verification against it.

The manifest is the last file written into a step and the first one read. Its text has exactly one
form: what does not equal its own serialisation byte for byte was changed. The hashes protect
against damage, not against somebody who can write to the folder and recompute them.

A step is verified before anything of it is used: every listed file is there with its size and hash,
nothing else is there, and tensor files parse. All problems are reported at once.
"""

import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from io import FileIO
from os import stat_result
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from verl.utils.checkpoint.layout import CheckpointCorruptError, naming
from verl.utils.checkpoint.safetensors_file import read_header

MANIFEST = "manifest.json"
FORMAT = "verl-checkpoint"
VERSION = 1
MAX_MANIFEST_BYTES = 16 << 20
MAX_THREADS = 8
BYTES_PER_THREAD = 64 << 20
READ_BYTES = 1 << 20

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    step: int
    files: dict[str, FileRecord]
    """By path relative to the step's folder, with forward slashes."""

    fingerprint: dict[str, Any]
    """What the run was: model, dataset, configuration (see `identity`)."""

    def to_text(self) -> str:
        body = {"format": FORMAT, "version": VERSION, **asdict(self)}
        text = _serialise({**body, "self_sha256": _hash_text(_serialise(body))})
        if len(text) > MAX_MANIFEST_BYTES:
            raise ValueError(
                f"the manifest would have {len(text)} bytes, of which the fingerprint "
                f"{len(_serialise(self.fingerprint))}; the limit is {MAX_MANIFEST_BYTES}"
            )
        return text


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a step's folder, if it is exactly what was written."""
    path = folder / MANIFEST
    try:
        with open_plain_file(path) as file:
            octets = file.read(MAX_MANIFEST_BYTES + 1)
    except FileNotFoundError as error:
        raise CheckpointCorruptError(
            folder, [f"{MANIFEST} is missing: the save never finished, or another program wrote it"]
        ) from error
    except OSError as error:
        raise CheckpointCorruptError(folder, [f"{MANIFEST}: {error.strerror}"]) from error
    if len(octets) > MAX_MANIFEST_BYTES:
        raise CheckpointCorruptError(
            folder, [f"{MANIFEST} is larger than {MAX_MANIFEST_BYTES} bytes"]
        )
    try:
        return _parse(octets)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointCorruptError(folder, [f"{MANIFEST} cannot be used: {error}"]) from error


def walk(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Everything below `folder` that is not a folder, by relative path; links are not followed."""
    pending = [""]
    while pending:
        prefix = pending.pop()
        with os.scandir(folder / prefix) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                name = f"{prefix}{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    pending.append(f"{name}/")
                else:
                    yield name, entry.stat(follow_symlinks=False)


def record_file(path: Path, *, sync: bool = False) -> FileRecord:
    """Size and hash of a file, after its contents reached the disk if `sync`."""
    with naming(path), open_plain_file(path) as file:
        if sync:
            os.fsync(file.fileno())
        digest, size = hashlib.sha256(), 0
        buffer = memoryview(bytearray(READ_BYTES))
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
    return FileRecord(size=size, sha256=digest.hexdigest())


def in_threads(
    work: Callable[[Item], Result], items: Iterable[Item], num_bytes: int
) -> list[Result]:
    """Hashing and reading leave Python's lock, so many bytes are hashed in several threads."""
    num_threads = min(MAX_THREADS, num_bytes // BYTES_PER_THREAD)
    if num_threads < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(num_threads) as pool:
        return list(pool.map(work, items))


def open_plain_file(path: Path) -> FileIO:
    """Open for reading, but no link and nothing that would block or answer."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    file = FileIO(descriptor, "rb")
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        file.close()
        raise OSError(0, "not a plain file", str(path))
    return file


def is_safe_name(name: str) -> bool:
    """Whether a path stays inside the folder it is relative to, on every system."""
    parts = name.split("/")
    return (
        not any(part in ("", ".", "..") for part in parts)
        and not PurePosixPath(name).is_absolute()
        and not any(symbol in name for symbol in "\\:\0")
    )


def _parse(octets: bytes) -> Manifest:
    text = octets.decode()
    content = json.loads(text, parse_constant=_refuse_constant)
    if (content["format"], content["version"]) != (FORMAT, VERSION):
        raise ValueError(f"format {content['format']!r} version {content['version']!r}")
    files = {name: FileRecord(**record) for name, record in content["files"].items()}
    manifest = Manifest(step=content["step"], files=files, fingerprint=content["fingerprint"])
    if manifest.to_text() != text:
        raise ValueError("it does not agree with its own hash")
    if type(manifest.step) is not int or type(manifest.fingerprint) is not dict:
        raise ValueError("its step is not a number, or its fingerprint not a dictionary")
    for name, record in files.items():
        if not is_safe_name(name):
            raise ValueError(f"it names {name!r}, which is not a path inside the folder")
        if type(record.size) is not int or type(record.sha256) is not str:
            raise ValueError(f"size and hash of {name!r} are {record.size!r}, {record.sha256!r}")
    return manifest


def _serialise(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=1, sort_keys=True, allow_nan=False)


def _hash_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


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

"""A local path for whatever the user gave as a model or a data file.

A remote path (`hdfs://`, `s3://`, anything fsspec knows) is copied once per machine and user, to a
folder that nobody else can write: a lock makes the other processes wait, and a copy appears under
its name only when it is whole. Beside it stands what was copied, sizes and hashes; a copy that
differs, or whose local source has changed, is made again. Local paths and names on a model hub are
passed through.
"""

import hashlib
import json
import logging
import os
import shutil
import stat
import uuid
from collections.abc import Callable
from pathlib import Path

import fsspec
from filelock import FileLock

from verl.utils import hdfs_io
from verl.utils.environment import cache_folder, use_modelscope
from verl.utils.hdfs_io import copy, exists, makedirs
from verl.utils.import_utils import require

__all__ = ["copy", "exists", "makedirs"]

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
LOCK_TIMEOUT_SECONDS = 4 * 3600.0
RECORD = ".copied.json"
STRUCTURE = ".directory_record.txt"
SAMPLE_BYTES = 1 << 20
NUM_SAMPLES = 16
"""Of a larger file that many blocks are hashed, evenly spread and with both ends."""


def is_non_local(path: str) -> bool:
    """Whether the path names a file system of its own, as in `hdfs://...` or `s3://...`."""
    scheme, separator, _ = str(path).partition("://")
    return bool(separator) and scheme != "file"


def local_mkdir_safe(path: str) -> str:
    """Create a local directory that may exist already (or be created by another process)."""
    os.makedirs(path, exist_ok=True)
    return path


def copy_to_local(
    src: str,
    cache_dir: str | None = None,
    filelock: str = ".file.lock",
    verbose: bool = False,
    always_recopy: bool = False,
    use_shm: bool = False,
) -> str:
    """A local path with the contents of `src`, copied only if `src` is remote.

    `use_shm` then stages it in shared memory, where all processes of the machine read it. With
    `VERL_USE_MODELSCOPE` a model name is downloaded from ModelScope.
    """
    local = copy_local_path_from_hdfs(src, cache_dir, filelock, verbose, always_recopy)
    if use_modelscope() and not os.path.exists(local):
        local = require("modelscope").snapshot_download(local)
    return copy_to_shm(local, filelock, always_recopy) if use_shm else local


def copy_local_path_from_hdfs(
    src: str,
    cache_dir: str | None = None,
    filelock: str = ".file.lock",
    verbose: bool = False,
    always_recopy: bool = False,
) -> str:
    """Copy a remote `src` (HDFS or another) to the cache; a local one is returned as it is."""
    src = str(src).rstrip("/") or "/"
    if not is_non_local(src):
        return src.removeprefix("file://")
    root = Path(cache_dir).expanduser() if cache_dir else cache_folder() / "copies"
    target = Path(get_local_temp_path(src, str(root)))
    if verbose:
        logger.warning("copying %s to %s", src, target)
    _copy_once(target, filelock, always_recopy, lambda partial: _download(src, partial))
    return str(target)


def copy_to_shm(src: str, filelock: str = ".file.lock", always_recopy: bool = False) -> str:
    """Copy a local file or directory to /dev/shm; where it cannot go, `src` itself serves."""
    if not os.path.exists(src):
        return src  # a hub name: transformers decides where it goes
    if not SHARED_MEMORY.is_dir():
        logger.warning("use_shm: this machine has no %s; reading %s directly", SHARED_MEMORY, src)
        return src
    root = SHARED_MEMORY / f"verl-{os.geteuid()}"
    target = Path(get_local_temp_path(os.path.abspath(src), str(root)))
    needed, free = _num_bytes(Path(src)), shutil.disk_usage(SHARED_MEMORY).free
    if not target.exists() and needed > free:
        logger.warning(
            "use_shm: %s needs %d bytes and %s has %d free; reading it directly",
            src, needed, SHARED_MEMORY, free,
        )  # fmt: skip
        return src

    def fetch(partial: Path) -> None:
        hdfs_io.copy(src, str(partial))
        if not verify_copy(src, str(partial)):
            raise OSError(f"the copy of {src} in {partial} is not complete: is the disk full?")

    try:
        _copy_once(target, filelock, always_recopy, fetch, source=Path(src))
    except PermissionError as foreign:
        logger.warning("use_shm: %s; reading %s directly", foreign, src)
        return src
    return str(target)


def own_folder(path: Path) -> Path:
    """Create a folder that only this user can write to, or refuse one that is somebody else's.

    What lies under a name that others can guess may be theirs: a model to train on, answers to
    learn from.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    if not is_own or found.st_mode & 0o022:
        raise PermissionError(
            f"{path} is a link, belongs to another user (uid {found.st_uid}) or can be written by "
            f"others (mode {stat.S_IMODE(found.st_mode):o}), so nobody knows who wrote what it "
            "holds; remove it, or choose another folder (VERL_CACHE for copies of remote files)"
        )
    return path


def verify_copy(src: str, dest: str) -> bool:
    """Whether both local paths hold the same files of the same sizes."""
    return _file_sizes(Path(src)) == _file_sizes(Path(dest))


def md5_encode(text: str) -> str:
    """A short name for a long path; nothing is secured by it."""
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()


def get_local_temp_path(hdfs_path: str, cache_dir: str) -> str:
    """Where the copy of a path lies: a folder per source, so that equal base names do not meet."""
    return os.path.join(cache_dir, md5_encode(hdfs_path), os.path.basename(hdfs_path))


def _record_directory_structure(folder_path: str) -> str:
    """Write the files and folders below a folder to a file in it; returns the file's path."""
    record = os.path.join(folder_path, STRUCTURE)
    Path(record).write_text("\n".join(_entries(Path(folder_path))))
    return record


def _check_directory_structure(folder_path: str, record_file: str) -> bool:
    """Whether a folder has the entries that were recorded, no more and no fewer."""
    record = Path(record_file)
    return record.exists() and record.read_text() == "\n".join(_entries(Path(folder_path)))


def _entries(folder: Path) -> list[str]:
    found = (str(path.relative_to(folder)) for path in folder.rglob("*"))
    return sorted(entry for entry in found if entry != STRUCTURE)


def _copy_once(
    target: Path,
    lock_name: str,
    always_recopy: bool,
    fetch: Callable[[Path], None],
    source: Path | None = None,
) -> None:
    """Let `fetch` write a sibling of `target` and rename it when it is complete.

    A copy that is there stays, if it is as it was written and `source`, where local, is too.
    """
    root = target.parent.parent
    if not root.is_dir():
        own_folder(root)
    elif root.stat().st_uid not in (0, os.geteuid()):
        raise PermissionError(
            f"{root} belongs to uid {root.stat().st_uid}, who could replace a copy in it; set "
            "VERL_CACHE (data.cache_dir for data) to a folder of your own"
        )
    with FileLock(own_folder(target.parent) / lock_name, timeout=LOCK_TIMEOUT_SECONDS):
        record = target.parent / RECORD
        source_now = None if source is None else fingerprint(source)
        if not always_recopy and _is_as_recorded(target, record, source_now):
            logger.info("cache: %s is used", target)
            return
        logger.info("cache: %s is made", target)
        partial = target.parent / f".{uuid.uuid4().hex}.partial"
        try:
            fetch(partial)
            copied = {"copy": fingerprint(partial), "source": source_now}
            record.unlink(missing_ok=True)
            _remove(target)
            os.replace(partial, target)
            record.write_text(json.dumps(copied))
        finally:
            _remove(partial)


def _is_as_recorded(target: Path, record: Path, source_now: dict[str, str] | None) -> bool:
    if not target.exists():
        return False
    if source_now is None and not record.exists():  # of an earlier version: whole when renamed
        record.write_text(json.dumps({"copy": fingerprint(target), "source": None}))
        return True
    try:
        copied = json.loads(record.read_text())
    except (FileNotFoundError, ValueError):  # the process that copied was killed before it wrote it
        copied = None
    if copied == {"copy": fingerprint(target), "source": source_now}:
        return True
    logger.warning("%s is not what was copied, or its source has changed; copying again", target)
    return False


def fingerprint(root: Path) -> dict[str, str]:
    """Size, time and hash of every file below a folder, or of a file; of large files in samples."""
    files = [root] if root.is_file() else sorted(path for path in root.rglob("*") if path.is_file())
    return {str(file.relative_to(root)): _file_fingerprint(file) for file in files}


def _file_fingerprint(path: Path) -> str:
    digest, size, time = hashlib.sha256(), path.stat().st_size, path.stat().st_mtime_ns
    with path.open("rb") as file:
        if size <= NUM_SAMPLES * SAMPLE_BYTES:
            digest.update(file.read())
        else:
            for number in range(NUM_SAMPLES):
                file.seek((size - SAMPLE_BYTES) * number // (NUM_SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return f"{size} {time} {digest.hexdigest()}"


def _download(src: str, target: Path) -> None:
    if hdfs_io.is_hdfs(src):
        copy(src, str(target))
        return
    filesystem, path = fsspec.core.url_to_fs(src)
    filesystem.get(path, str(target), recursive=filesystem.isdir(path))


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _file_sizes(root: Path) -> dict[str, int]:
    if root.is_file():
        return {"": root.stat().st_size}
    return {
        str(file.relative_to(root)): file.stat().st_size
        for file in root.rglob("*")
        if file.is_file()
    }


def _num_bytes(root: Path) -> int:
    return sum(_file_sizes(root).values())

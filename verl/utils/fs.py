"""A local path for whatever the user gave as a model or a data file.

A remote path (`hdfs://`, `s3://`, anything fsspec knows) is copied to a cache directory once per
machine: a lock makes the other processes wait, and a copy appears under its name only when it is
whole. Local paths and names on a model hub are passed through.
"""

import hashlib
import logging
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path

import fsspec
from filelock import FileLock

from verl.utils import hdfs_io
from verl.utils.environment import use_modelscope
from verl.utils.hdfs_io import copy, makedirs
from verl.utils.import_utils import require

__all__ = ["copy", "makedirs"]

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
LOCK_TIMEOUT_SECONDS = 4 * 3600.0


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
    target = _cached_path(src, Path(cache_dir or tempfile.gettempdir()))
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
    target = _cached_path(os.path.abspath(src), SHARED_MEMORY / "verl-cache")
    needed, free = _num_bytes(Path(src)), shutil.disk_usage(SHARED_MEMORY).free
    if not target.exists() and needed > free:
        logger.warning(
            "use_shm: %s needs %d bytes and %s has %d free; reading it directly",
            src, needed, SHARED_MEMORY, free,
        )  # fmt: skip
        return src

    def copy(partial: Path) -> None:
        hdfs_io.copy(src, str(partial))
        verify_copy(src, str(partial))

    _copy_once(target, filelock, always_recopy, copy)
    return str(target)


def verify_copy(src: str, dest: str) -> None:
    """Raise unless both local paths hold the same files of the same sizes."""
    expected, found = _file_sizes(Path(src)), _file_sizes(Path(dest))
    if expected != found:
        wrong = sorted(
            name for name in {*expected, *found} if expected.get(name) != found.get(name)
        )
        raise OSError(f"the copy of {src} in {dest} is not complete: {', '.join(wrong[:5])}")


def _cached_path(src: str, root: Path) -> Path:
    """One directory per source, so that equal base names do not meet."""
    return root / hashlib.sha256(src.encode()).hexdigest()[:32] / os.path.basename(src)


def _copy_once(
    target: Path, lock_name: str, always_recopy: bool, fetch: Callable[[Path], None]
) -> None:
    """Let `fetch` write a sibling of `target` and rename it when it is complete."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.parent / lock_name, timeout=LOCK_TIMEOUT_SECONDS):
        if target.exists() and not always_recopy:
            return
        partial = target.parent / f".{uuid.uuid4().hex}.partial"
        try:
            fetch(partial)
            _remove(target)
            os.replace(partial, target)
        finally:
            _remove(partial)


def _download(src: str, target: Path) -> None:
    if hdfs_io.is_hdfs(src):
        hdfs_io.copy(src, str(target))
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

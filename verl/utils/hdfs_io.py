"""Files that may be on HDFS: `exists`, `makedirs` and `copy` for `hdfs://` and for local paths.

HDFS is reached through Hadoop's own `hdfs` command. A local path goes through the standard library.
"""

import os
import shutil
import subprocess
from typing import Any

HDFS_PREFIX = "hdfs://"
COPY_TIMEOUT_SECONDS = 4 * 3600.0
LOOKUP_TIMEOUT_SECONDS = 120.0


def exists(path: str, **_: Any) -> bool:
    if not is_hdfs(path):
        return os.path.exists(path)
    return _hdfs("-test", "-e", path, allowed=(0, 1)) == 0


def makedirs(name: str, mode: int = 0o777, exist_ok: bool = False, **_: Any) -> None:
    """Create a directory and its parents; on HDFS its mode is the file system's default."""
    if not is_hdfs(name):
        os.makedirs(name, mode=mode, exist_ok=exist_ok)
        return
    if not exist_ok and exists(name):
        raise FileExistsError(f"{name} exists already")
    _hdfs("-mkdir", "-p", name)


def copy(src: str, dst: str, **kwargs: Any) -> bool:
    """Copy a file or a directory; either end may be on HDFS. Returns True, or raises.

    Between local paths `kwargs` go to `shutil.copytree` or `shutil.copy`.
    """
    if is_hdfs(src) and is_hdfs(dst):
        _hdfs("-cp", "-f", src, dst, timeout_seconds=COPY_TIMEOUT_SECONDS)
    elif is_hdfs(src):
        _hdfs("-get", "-f", src, dst, timeout_seconds=COPY_TIMEOUT_SECONDS)
    elif is_hdfs(dst):
        _hdfs("-put", "-f", src, dst, timeout_seconds=COPY_TIMEOUT_SECONDS)
    elif os.path.isdir(src):
        shutil.copytree(src, dst, **kwargs)
    else:
        shutil.copy(src, dst, **kwargs)
    return True


def is_hdfs(path: str) -> bool:
    return str(path).startswith(HDFS_PREFIX)


def _hdfs(
    *arguments: str,
    allowed: tuple[int, ...] = (0,),
    timeout_seconds: float = LOOKUP_TIMEOUT_SECONDS,
) -> int:
    """Run `hdfs dfs ...` and return its exit code, which must be one of `allowed`."""
    command = shutil.which("hdfs")
    if command is None:
        raise RuntimeError(
            f"{arguments[-1]} is on HDFS, and the command `hdfs` is not on the PATH; install "
            "Hadoop's client, or copy the files yourself and give a local path"
        )
    run = subprocess.run(
        [command, "dfs", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        check=False,
    )
    if run.returncode not in allowed:
        raise RuntimeError(
            f"hdfs dfs {' '.join(arguments)} failed with exit code {run.returncode}: "
            f"{run.stderr.strip()[-1000:]}"
        )
    return run.returncode

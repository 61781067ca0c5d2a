"""A committed step, copied to a second place: HDFS, or a folder on another disk.

The tracker file goes last, so it never names a step of which only a part is there.
"""

import subprocess
from pathlib import Path

from verl.utils import hdfs_io
from verl.utils.checkpoint.layout import TRACKER, CheckpointUploadError


def upload_step(folder: Path, remote: str) -> None:
    """Copy the step in `folder` below `remote`; a copy of it that is there is replaced."""
    remote = remote.rstrip("/")
    options = {} if hdfs_io.is_hdfs(remote) else {"dirs_exist_ok": True}
    try:
        hdfs_io.makedirs(remote, exist_ok=True)
        hdfs_io.copy(str(folder), f"{remote}/{folder.name}", **options)
        hdfs_io.copy(str(folder.parent / TRACKER), f"{remote}/{TRACKER}")
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        raise CheckpointUploadError(folder, remote, str(error)) from error

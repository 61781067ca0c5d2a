"""Saving while training goes on: a background job, the receipts of ranks, the upload of a step.

    training thread                            worker thread
      start(job)  waits for the job before ->    runs the job, keeps what it raised
      finish(s)   waits at most s seconds  <-    ends
                  raises what the job raised, once

The thread does not keep the process alive: whoever must not leave before the job has ended calls
`finish`.

A rank that writes in the background tells the owner of the step that it is done with a receipt, a
small file in the step's folder. It exists, at full size, from the moment the rank begins, and is
changed in place when it ends, so it needs no space that a full disk would not have and no message
that training would have to make room for. Some disks refuse even that (copy on write, quotas); then
the rank takes the receipt away. A rank that is killed leaves it as it is: who collects asks, while
it waits, whether all are alive.

    rank     begin -> ... writes ... -> end            owner of the step
               "writing"                 "written"       collect: until none is "writing"
                                         or the error
                                         or no receipt

Last, `upload_step` copies a committed step to HDFS or another disk; the tracker file goes last, so
it never names a step of which only a part is there.
"""

import errno
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from verl.utils import hdfs_io
from verl.utils.checkpoint.layout import (
    TRACKER,
    CheckpointError,
    CheckpointUploadError,
    as_os_error,
    naming,
    write_all,
)

COMMIT_TIMEOUT_SECONDS = 3600.0
"""A save that takes longer has stopped, not slowed down."""


class Background:
    """One job at a time."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    @property
    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, job: Callable[[], None]) -> None:
        """Run `job` once the one before has ended; what that one raised is raised here."""
        self.finish()
        self._thread = threading.Thread(target=self._run, args=(job,), name=self.name, daemon=True)
        self._thread.start()

    def finish(self, timeout_seconds: float = COMMIT_TIMEOUT_SECONDS) -> None:
        """Wait for the job, if there is one, and raise what it raised."""
        if self._thread is not None:
            self._thread.join(timeout_seconds)
            if self._thread.is_alive():
                raise TimeoutError(f"{self.name} has not ended within {timeout_seconds:g} s")
        self.check()

    def check(self) -> None:
        """Raise what a job raised that has ended; one that goes on is left alone."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            self._failure = error


RECEIPT_BYTES = 4096
POLL_SECONDS, CHECK_SECONDS = 0.05, 1.0


class Receipt:
    """One rank's word; the file is made when the object is."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        with naming(path), open(path, "wb", buffering=0) as file:
            write_all(file, _padded({"state": "writing"}))

    def end(self, error: Exception | None = None) -> None:
        """Everything is written, or `error` is why it is not."""
        content: dict[str, object] = {"state": "written" if error is None else "failed"}
        if error is not None:
            refusal = as_os_error(error)
            content["text"] = f"{type(error).__name__}: {error}"[:1000]
            if refusal is not None:
                content |= {"errno": refusal.errno, "strerror": str(refusal.strerror)[:200]}
                content["filename"] = str(refusal.filename or "")[:500]
        try:
            with naming(self.path), open(self.path, "r+b", buffering=0) as file:
                os.pwrite(file.fileno(), _padded(content), 0)
        except OSError:
            # It is gone with its folder where another rank has failed before.
            self.path.unlink(missing_ok=True)


def collect_receipts(
    paths: Sequence[Path], timeout_seconds: float, checks: Sequence[Callable[[], None]] = ()
) -> None:
    """Wait until every rank has written all, and take the receipts away.

    Raises what a rank met: an `OSError` if the disk refused it. A rank that has died changes no
    receipt: one of `checks` raises then, which counts unless all had been written before.
    """
    deadline = time.monotonic() + timeout_seconds
    waiting, next_check = list(paths), time.monotonic() + CHECK_SECONDS
    while waiting:
        waiting = list(_still_writing(waiting))
        if waiting and time.monotonic() > next_check:
            next_check = time.monotonic() + CHECK_SECONDS
            try:
                for check in checks:
                    check()
            except Exception:
                waiting = list(_still_writing(waiting))
                if waiting:
                    raise
        if waiting and time.monotonic() > deadline:
            names = ", ".join(str(path) for path in waiting[:4])
            raise CheckpointError(
                f"{len(waiting)} of {len(paths)} ranks have not written their part of the "
                f"checkpoint within {timeout_seconds:g} s: {names}"
            )
        if waiting:
            time.sleep(POLL_SECONDS)


def _still_writing(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        content = _read(path)
        if content["state"] == "writing":
            yield path
        elif content["state"] == "failed":
            if "errno" in content:
                raise OSError(content["errno"], content["strerror"], content["filename"])
            raise CheckpointError(f"{path.parent.name}: {path.name}: {content['text']}")
        else:
            path.unlink()


def _read(path: Path) -> dict[str, object]:
    """What the receipt says; one that is being changed still counts as being written."""
    if not os.access(path.parent, os.W_OK):
        raise OSError(errno.EROFS, "nothing can be written here, not even receipts", str(path))
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError as error:
        refusal = "the disk refused what a rank wrote, and its receipt too"
        raise OSError(errno.EIO, refusal, str(path)) from error
    except ValueError:
        return {"state": "writing"}


def _padded(content: dict[str, object]) -> bytes:
    text = json.dumps(content).encode()
    assert len(text) <= RECEIPT_BYTES, "the parts of a receipt are cut"
    return text.ljust(RECEIPT_BYTES)


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

"""How a rank that writes in the background tells the owner of the step that it is done.

A receipt is a small file in the step's folder, beside what the rank writes: it is there, and says
so, from the moment the rank begins, and is changed in place when it ends. So it needs no space that
a full disk would not have, and no message that training would have to make room for.

    rank     begin -> ... writes ... -> end            owner of the step
               "writing"                 "written"       collect: until none is "writing"
                                         or the error
"""

import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from verl.utils.checkpoint.layout import CheckpointError, as_os_error, naming, write_all

RECEIPT_BYTES = 4096
POLL_SECONDS = 0.05


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
        with naming(self.path), open(self.path, "r+b", buffering=0) as file:
            os.pwrite(file.fileno(), _padded(content), 0)


def collect_receipts(paths: Sequence[Path], timeout_seconds: float) -> None:
    """Wait until every rank has written all, and take the receipts away.

    Raises what a rank met: an `OSError` if the disk refused it.
    """
    deadline = time.monotonic() + timeout_seconds
    waiting = list(paths)
    while waiting:
        waiting = list(_still_writing(waiting))
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
    try:
        return json.loads(path.read_bytes())
    except ValueError:
        return {"state": "writing"}


def _padded(content: dict[str, object]) -> bytes:
    text = json.dumps(content).encode()
    assert len(text) <= RECEIPT_BYTES, "the parts of a receipt are cut"
    return text.ljust(RECEIPT_BYTES)

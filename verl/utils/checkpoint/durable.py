"""Files and folders that are still there after the power fails.

`write` and `rename` only change memory; `fsync` of the file and of the folder that names it make
the change last. Errors carry the path they are about, which Python leaves out of a failed `write`.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from verl.utils.checkpoint.layout import as_os_error

CHUNK_BYTES = 16 << 20


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Raise what the system refused as an `OSError` that says which file or folder it is about."""
    try:
        yield
    except Exception as error:
        refusal = as_os_error(error)
        if refusal is None:
            raise
        if refusal.filename is None:
            refusal.filename = str(path)
        if refusal is error:
            raise
        raise refusal from error


def write_all(file: FileIO, octets: bytes | memoryview) -> None:
    """Write everything; one call may accept only part of it."""
    rest = memoryview(octets)
    while rest:
        rest = rest[file.write(rest[:CHUNK_BYTES]) :]


def write_durably(path: Path, octets: bytes) -> None:
    """Create or replace the file at `path` and sync it; its name is synced by `sync_folder`."""
    with naming(path), open(path, "wb", buffering=0) as file:
        write_all(file, octets)
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Make the names in a folder last."""
    with naming(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def make_folders(path: Path) -> None:
    """Create a folder and its missing parents, each entered durably into the one above."""
    if path.is_dir():
        return
    make_folders(path.parent)
    path.mkdir(exist_ok=True)
    sync_folder(path.parent)

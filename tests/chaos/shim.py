"""Processes with a disk and a clock that misbehave: builds and steers `shim.c`."""

import mmap
import shutil
import struct
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_suffix(".c")
NUMBERS = struct.Struct("<qqq")


class NoCompiler(Exception):
    """There is no C compiler on this machine."""


@cache
def built(folder: Path) -> Path:
    """The library; raises where there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise NoCompiler("there is no C compiler (cc, gcc) to build the shim with")
    library = folder / "shim.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"]
    subprocess.run([*command, "-lpthread"], check=True, timeout=60)
    return library


def require_shim(folder: Path) -> Path:
    try:
        return built(folder)
    except NoCompiler as error:
        pytest.skip(str(error))


class Control:
    """What the disk and the clock of all processes with this control file do, from now on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_bytes(bytes(4096))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 4096)

    def set(
        self, *, clock_seconds: float = 0.0, slow_seconds: float = 0.0, is_full: bool = False
    ) -> None:
        numbers = (int(clock_seconds * 1e9), int(slow_seconds * 1e6), int(is_full))
        NUMBERS.pack_into(self._map, 0, *numbers)


def environment(
    library: Path,
    root: Path,
    *,
    log: Path | None = None,
    control: Control | None = None,
    loses_syncs: bool = False,
) -> dict[str, str]:
    """Variables for a process whose changes below `root` pass through the shim."""
    variables = {"LD_PRELOAD": str(library), "VERL_SHIM_ROOT": str(root)}
    if log is not None:
        variables["VERL_SHIM_LOG"] = str(log)
    if control is not None:
        variables["VERL_SHIM_CONTROL"] = str(control.path)
    if loses_syncs:
        variables["VERL_SHIM_UNSYNCED"] = "1"
    return variables


@dataclass(frozen=True)
class Operation:
    call: str
    path: str
    other: str
    offset: int
    content: bytes


def recorded(log: Path) -> list[Operation]:
    """What a log holds, in the order in which it happened."""
    operations, text, place = [], log.read_bytes(), 0
    while place < len(text):
        end = text.index(b"\n", place)
        call, path, other, offset, length = text[place:end].decode().split("\t")
        start = end + 1
        place = start + int(length) + 1
        content = text[start : place - 1]
        operations.append(Operation(call, path, other, int(offset), content))
    return operations

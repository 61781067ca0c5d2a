"""What another process is doing, asked from outside while it cannot answer a call.

A worker `announce`s itself once: its pid, its host, and a file into which the interpreter writes
its stack when SIGUSR1 arrives (this works in the middle of a C call and without the GIL). The file
has no name; whoever asks reads it through `/proc/<pid>/fd`, so nothing is left behind. Linux only;
elsewhere the probes say that they cannot tell.
"""

import faulthandler
import os
import signal
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_dump_file: IO[str] | None = None  # kept open for the life of the process


@dataclass(frozen=True)
class ProcessAddress:
    pid: int
    host: str
    dump_descriptor: int | None = None


def announce(*, all_threads: bool = False) -> ProcessAddress:
    """Called in the worker: from now on its stack can be asked for."""
    global _dump_file
    if sys.platform != "linux":
        return ProcessAddress(os.getpid(), socket.gethostname())
    if _dump_file is None:
        _dump_file = tempfile.TemporaryFile("w+")  # noqa: SIM115
        faulthandler.register(signal.SIGUSR1, file=_dump_file, all_threads=all_threads)
    return ProcessAddress(os.getpid(), socket.gethostname(), _dump_file.fileno())


def is_stopped(pid: int) -> bool:
    """Whether a process exists but was stopped by a signal (SIGSTOP, SIGTSTP)."""
    return _state(pid) == "T"


def stack_of(address: ProcessAddress, timeout_seconds: float = 2.0) -> str:
    """The Python stack of a process on this machine, or a sentence why there is none."""
    state = _state(address.pid)
    if state == "T":
        return "stopped by a signal (SIGSTOP or SIGTSTP); `kill -CONT` would continue it"
    if state in ("", "Z", "X") or address.dump_descriptor is None:
        return "its stack is not available"
    file = Path(f"/proc/{address.pid}/fd/{address.dump_descriptor}")
    try:
        written = file.stat().st_size
        os.kill(address.pid, signal.SIGUSR1)
        _wait_until_written(file, written, timeout_seconds)
        with file.open() as dump:
            dump.seek(written)
            return dump.read().strip() or f"no stack within {timeout_seconds:g} s (state {state})"
    except OSError as error:
        return f"its stack is not available ({error})"


def _wait_until_written(file: Path, size: int, timeout_seconds: float) -> None:
    """Wait until the file has grown beyond `size` and has stopped growing."""
    give_up = time.monotonic() + timeout_seconds
    previous = size
    while time.monotonic() < give_up:
        time.sleep(0.05)
        current = file.stat().st_size
        if current > size and current == previous:
            return
        previous = current


def _state(pid: int) -> str:
    """The letter of /proc/<pid>/stat, or "" where there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[0]

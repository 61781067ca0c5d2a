"""The process that writes the store, as the trainer sees it.

    trainer                          writer (`verl.board.writer`)
      write_message ---descriptor--->  reads, decodes texts, one transaction per step
      _hear         <-----reply------  "written", or why it cannot write

The trainer never waits: a message is a file in memory whose descriptor travels over a socket, and
replies are read when the next step is handed over. While `MAX_WAITING` messages or
`MAX_WAITING_BYTES` wait to be written, `is_behind` asks for messages without arrays; those are few
bytes, and wait here.

When the trainer ends, by whatever it ends, the writer finds the end of the socket behind the last
message, writes what it was given, and ends too. A writer that ended or failed ends the recording
with a warning, not the run.
"""

import json
import logging
import os
import select
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from verl.board.message import write_message
from verl.utils.environment import scrubbed_environment
from verl.utils.line import close_in_forks
from verl.utils.processes import ending_of, reap

logger = logging.getLogger(__name__)

MAX_WAITING = 64
MAX_WAITING_BYTES = 256 << 20
"""One step more may wait: what reaches the limit."""

START_SECONDS = 120.0
CLOSE_SECONDS = 30.0
END_SECONDS = 10.0
REPLY_BYTES = 1 << 16
BOOT = "import sys; del sys.path[0]; from verl.board.writer import main; main()"


class StoreProcess:
    """Starts the writer of the store at `path`; `setup` is what `verl.board.writer` begins with."""

    def __init__(
        self, path: Path, setup: Mapping[str, Any], *, max_waiting_bytes: int = MAX_WAITING_BYTES
    ) -> None:
        self._path, self._max_waiting_bytes = path, max_waiting_bytes
        self._waiting: deque[tuple[int, int]] = deque()  # step and bytes of each message over there
        self._unsent: deque[tuple[int, Mapping[str, Any]]] = deque()
        self._failure: str | None = None
        self._next_step = int(setup["first_step"]) + 1
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        close_in_forks(self._line)
        self._line.setblocking(False)
        self._process: subprocess.Popen[bytes] | None = None
        with theirs:
            try:
                self._process = spawn(theirs)
            except OSError as error:
                self._fail(f"the process that writes did not start: {error}")
        self._send(self._next_step, setup, {})
        deadline = time.monotonic() + START_SECONDS
        while self._waiting and self.is_recording:
            if time.monotonic() > deadline:
                self._fail(f"the process that writes did not start within {START_SECONDS:g} s")
            self._hear(wait_seconds=1.0)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_recording(self) -> bool:
        return self._failure is None

    @property
    def is_behind(self) -> bool:
        """Whether so much waits to be written that the next message must have no arrays."""
        self._hear()
        num_bytes = sum(size for _, size in self._waiting)
        is_full = len(self._waiting) >= MAX_WAITING or num_bytes >= self._max_waiting_bytes
        return is_full or bool(self._unsent)

    def add(
        self, step: int, content: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None = None
    ) -> None:
        """Hand over a step; returns at once. None that `is_behind` has arrays."""
        self._hear()
        self._next_step = step + 1
        if arrays:
            self._send(step, content, arrays)
        elif self.is_recording:
            self._unsent.append((step, content))
            self._send_what_waits()

    def close(self) -> None:
        """Have everything written, within `CLOSE_SECONDS`."""
        deadline = time.monotonic() + CLOSE_SECONDS
        while (self._waiting or self._unsent) and self.is_recording:
            if time.monotonic() > deadline:
                self._fail(f"still writing after {CLOSE_SECONDS:g} s")
            self._hear(wait_seconds=1.0)
            self._send_what_waits()
        if self.is_recording:
            self._line.close()
            assert self._process is not None
            reap(self._process, CLOSE_SECONDS)  # it moves the log into the file

    def _send_what_waits(self) -> None:
        while self._unsent and len(self._waiting) < MAX_WAITING and self.is_recording:
            self._send(*self._unsent.popleft(), {})

    def _send(
        self, step: int, content: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
    ) -> None:
        if not self.is_recording:
            return
        try:
            descriptor = write_message(content, arrays)
            try:
                self._waiting.append((step, os.fstat(descriptor).st_size))
                socket.send_fds(self._line, [b"message"], [descriptor])
            finally:
                os.close(descriptor)
        except (BrokenPipeError, ConnectionResetError):
            self._hear(wait_seconds=END_SECONDS)  # it says why, or has ended
        except OSError as error:
            self._fail(f"{type(error).__name__}: {error}")

    def _hear(self, *, wait_seconds: float = 0.0) -> None:
        """Read the replies that are here; wait for one if there is none."""
        poll = select.poll()
        if self.is_recording:
            poll.register(self._line, select.POLLIN)
        while self.is_recording and poll.poll(wait_seconds * 1000):
            wait_seconds = 0.0
            try:
                reply = self._line.recv(REPLY_BYTES)
            except ConnectionResetError:  # it ended with messages unread: a reply may be behind it
                continue
            failure = json.loads(reply)["failure"] if reply else self._ending()
            if failure is None:
                self._waiting.popleft()
            else:
                self._fail(failure)

    def _ending(self) -> str:
        assert self._process is not None
        reap(self._process, END_SECONDS)
        return ending_of(self.pid, self._process.returncode, ())

    def _fail(self, reason: str) -> None:
        self._failure = reason
        unwritten = (step for step, _ in (*self._waiting, *self._unsent))
        logger.warning(
            "recording for the run page ends at step %d, training goes on: %s (%s)",
            min(unwritten, default=self._next_step),
            reason,
            self._path,
        )
        self._waiting.clear()
        self._unsent.clear()
        self._line.close()
        if self._process is not None:
            self._process.kill()
            reap(self._process, END_SECONDS)


def spawn(line: socket.socket) -> "subprocess.Popen[bytes]":
    """Start the writer with its end of the socket. Ctrl-C is for the trainer alone."""
    return subprocess.Popen(
        [sys.executable, "-c", BOOT, str(os.getpid())],
        stdin=line.fileno(),
        stdout=subprocess.DEVNULL,
        env=writer_environment(),
        start_new_session=True,
    )


def writer_environment() -> dict[str, str]:
    """Modules come from where ours come from; one thread, for the processors are the training's."""
    modules = os.pathsep.join(path or os.getcwd() for path in sys.path)
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {
        **scrubbed_environment(),
        **threads,
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": modules,
    }

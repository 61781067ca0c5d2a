"""The engine's process as its parent sees it: started, listened to, ended.

    stdin    one line: token, descriptor of the line between the two, who the parent is
    line     a socket that only these two have (`wire`)
    stdout, stderr    read by a thread, which keeps the last lines for error messages

The process leads a group of its own, so that whatever the engine starts ends with it. Another
interpreter sees `verl` alone of what we import, through a folder with one link: an engine's
environment must not find the rest of ours.
"""

import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from verl.utils.environment import scrubbed_environment
from verl.utils.processes import ending_of
from verl.workers.rollout.process.wire import Wire

logger = logging.getLogger(__name__)

PACKAGE = Path(__file__).parents[3]
BOOT = (
    "import gc, sys; gc.disable(); sys.path[0] = sys.argv.pop(1); "
    "from verl.workers.rollout.process.host import main; main()"
)
TAIL_LINES = 60
LINE_CHARACTERS = 2000
END_SECONDS = 10.0
LOOK_SECONDS = 0.02


class Child:
    """One engine process; `wire` is our end of its socket."""

    def __init__(
        self, python: str | None, environment: Mapping[str, str], *, heartbeat_seconds: float
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(
            prefix="verl-engine-", ignore_cleanup_errors=True
        )
        Path(self._folder.name, PACKAGE.name).symlink_to(PACKAGE)
        self._token = secrets.token_hex(32)
        self._owner = os.getpid()  # a fork of this process must not end the engine
        ours, theirs = socket.socketpair()
        self.wire = Wire(ours)
        variables = child_environment(environment, self._folder.name, is_ours=python is None)
        with theirs:
            try:
                self._process = self._spawn(python or sys.executable, variables, theirs.fileno())
            except OSError:
                self.wire.close()
                self._folder.cleanup()
                raise
            self._introduce(theirs.fileno(), heartbeat_seconds)
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._listener = threading.Thread(target=self._listen, name="engine output", daemon=True)
        self._listener.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def handshake(self, timeout_seconds: float) -> None:
        """Wait for the process and verify its token."""
        self.wire.handshake(self._token, starts=False, timeout_seconds=timeout_seconds)

    def has_ended(self) -> bool:
        """Whether the process has ended; it is not reaped, so that its pid is not reused."""
        if self._process.returncode is not None:
            return True
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        try:
            return os.waitid(os.P_PID, self.pid, flags) is not None
        except ChildProcessError:  # another thread has just ended it
            return True

    def end_within(self, seconds: float) -> None:
        """Wait up to `seconds` for the process to end by itself."""
        deadline = time.monotonic() + seconds
        while not self.has_ended() and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)

    def kill(self) -> None:
        """Kill the process group, from any thread; the reader of the line finds it ended."""
        if self._process.returncode is None and os.getpid() == self._owner:
            with suppress(ProcessLookupError):  # nobody of the group is left
                os.killpg(self.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill the process group and release what is ours; a second call does nothing."""
        if self._process.returncode is None:
            self.kill()
            self._process.wait(timeout=END_SECONDS)
        self._listener.join(timeout=1.0)  # a survivor of the group may hold its end open
        self.wire.close()
        self._folder.cleanup()

    def stderr_tail(self) -> str:
        """Exit status of the process and the last lines it wrote."""
        return ending_of(self.pid, self._process.returncode, self._tail)

    def _spawn(
        self, python: str, variables: dict[str, str], descriptor: int
    ) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            [python, "-c", BOOT, self._folder.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=variables,
            pass_fds=[descriptor],
            start_new_session=True,
        )

    def _introduce(self, descriptor: int, heartbeat_seconds: float) -> None:
        setup = {
            "token": self._token,
            "descriptor": descriptor,
            "parent": os.getpid(),
            "heartbeat_seconds": heartbeat_seconds,
            "folder": self._folder.name,
        }
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as stdin:  # ended: the line tells
            stdin.write(json.dumps(setup).encode() + b"\n")

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            while line := stream.readline(LINE_CHARACTERS):
                text = line.decode(errors="replace").rstrip()
                self._tail.append(text)
                logger.debug("engine %d: %s", self.pid, text)


def child_environment(
    additions: Mapping[str, str], folder: str, *, is_ours: bool
) -> dict[str, str]:
    """Ours without what is ours alone, and `additions`. Modules come from `folder`, from where
    `additions` say, and if the interpreter `is_ours`, from where ours come."""
    paths = [folder, *filter(None, [additions.get("PYTHONPATH")])]
    if is_ours:
        paths += [path or os.getcwd() for path in sys.path]
    return scrubbed_environment() | {**additions, "PYTHONPATH": os.pathsep.join(paths)}

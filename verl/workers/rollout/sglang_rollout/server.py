"""SGLang's server as a child of the engine's process: started, waited for, ended.

It listens on this machine alone and wants a key, which it reads from a file that nobody else may
read: a command line is visible to everybody. It is in the process group of the engine, which is
ended as a whole, and it ends by itself if the engine's process ends first. What it writes goes on
to where the engine writes, and the last lines are kept for error messages.
"""

import json
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.workers.rollout.sglang_rollout.arguments import command_line, unknown_arguments
from verl.workers.rollout.sglang_rollout.http_client import ServerClient, ServerRefusedError

DIE_WITH_PARENT = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); "
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)
"""1 is PR_SET_PDEATHSIG, 9 is SIGKILL; both stay in force when the program is replaced."""

LOOK_SECONDS = 0.2
END_SECONDS = 15.0
TAIL_LINES = 40


class Server:
    """One server; `client` speaks to it."""

    def __init__(
        self, command: Sequence[str], arguments: Mapping[str, Any], settings: Mapping[str, Any]
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="verl-sglang-")
        api_key, port = secrets.token_hex(32), free_port()
        secret = Path(self._folder.name, "secret.yaml")  # JSON is YAML
        with open(os.open(secret, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump({"api-key": api_key}, file)
        words = command_line({**arguments, "port": port, "config": str(secret)})
        self._process = subprocess.Popen(
            [sys.executable, "-c", DIE_WITH_PARENT, *command, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._listener = threading.Thread(target=self._listen, name="SGLang output", daemon=True)
        self._listener.start()
        self.client = ServerClient(
            port=port,
            api_key=api_key,
            timeout=settings["timeout"],
            max_attempts=settings["max_attempts"],
            retry_delay=settings["retry_delay"],
        )

    def wait_until_ready(self, seconds: float) -> None:
        """Until it generates. ValueError if it does not know one of its arguments."""
        deadline = time.monotonic() + seconds
        while not self._answers():
            if not self.is_alive():
                self._listener.join(timeout=LOOK_SECONDS)
                unknown = unknown_arguments("\n".join(self._tail))
                if unknown is not None:
                    raise ValueError(unknown)
                raise RuntimeError(f"SGLang's server did not start: {self.last_words()}")
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"SGLang's server was not ready within {seconds:g} seconds; if it only needs "
                    f"longer, raise rollout.server.max_start_wait_time. {self.last_words()}"
                )
            time.sleep(LOOK_SECONDS)

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def last_words(self) -> str:
        """How it ended, and the last lines it wrote."""
        code = self._process.poll()
        if code is None:
            how = f"process {self._process.pid} runs"
        elif code < 0:
            how = f"process {self._process.pid} was ended by {signal.Signals(-code).name}"
        else:
            how = f"process {self._process.pid} ended with exit code {code}"
        lines = "\n".join(f"    {line}" for line in self._tail)
        return f"{how}; the last that it wrote:\n{lines}"

    def close(self) -> None:
        """SGLang ends its own children on SIGTERM; what is left goes with the process group."""
        self._process.terminate()
        try:
            self._process.wait(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=END_SECONDS)
        self._folder.cleanup()

    def _answers(self) -> bool:
        try:
            self.client.call_once("/health")
        except (OSError, ServerRefusedError):
            return False
        return True

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            for line in stream:
                text = line.decode(errors="replace")
                self._tail.append(text.rstrip())
                sys.stderr.write(text)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]

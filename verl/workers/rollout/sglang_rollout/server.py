"""SGLang's server as a child of the engine's process, and calls to it.

It listens on this machine alone and requires a key, which it reads from a file that nobody else may
read: a command line is visible to everybody. It is in the process group of the engine, which is
ended as a whole, and it ends by itself if the engine's process ends first. Its output goes to where
the engine writes, and the last lines are kept for error messages.

A call has its own connection and a deadline, with the standard library alone. It is sent again only
where it certainly was not taken: nobody accepted the connection, or the server was busy (503).
"""

import contextlib
import http.client
import json
import logging
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.utils.processes import DIE_WITH_PARENT, ending_of, reap
from verl.workers.rollout.sglang_rollout.arguments import command_line, unknown_arguments

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.2
END_SECONDS, ENDING_SECONDS = 15.0, 2.0
TAIL_LINES, PORT_ATTEMPTS = 40, 3


class PortTakenError(RuntimeError):
    """Another process took the port between its choice and its use."""


def ready_server(
    command: Sequence[str], arguments: Mapping[str, Any], settings: Mapping[str, Any]
) -> "Server":
    """One that is ready; if its port was taken meanwhile, on another one."""
    for attempts_left in reversed(range(PORT_ATTEMPTS)):
        server = Server(command, arguments, settings)
        try:
            server.wait_until_ready(settings["max_start_wait_time"])
        except BaseException as error:
            server.close()
            if not isinstance(error, PortTakenError) or not attempts_left:
                raise
            logger.warning("%s; starting it on another port", error)
        else:
            return server
    raise AssertionError("the last attempt raises or returns")


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
        """Wait until the server generates; ValueError if it does not know one of its arguments."""
        deadline = time.monotonic() + seconds
        while not self._answers():
            if not self.is_alive():
                self._listener.join(timeout=LOOK_SECONDS)
                unknown = unknown_arguments("\n".join(self._tail))
                if unknown is not None:
                    raise ValueError(unknown)
                is_taken = any("address already in use" in line.lower() for line in self._tail)
                kind = PortTakenError if is_taken else RuntimeError
                raise kind(f"SGLang's server did not start: {self.stderr_tail()}")
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"SGLang's server was not ready within {seconds:g} seconds; if it only needs "
                    f"longer, raise rollout.server.max_start_wait_time. {self.stderr_tail()}"
                )
            time.sleep(LOOK_SECONDS)

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def stderr_tail(self) -> str:
        """How it ended, and the last lines it wrote; its lines close a little before it ends."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(ENDING_SECONDS)
        return ending_of(self._process.pid, self._process.poll(), self._tail)

    def close(self) -> None:
        """SGLang ends its own children on SIGTERM; what is left goes with the process group."""
        self._process.terminate()
        reap(self._process, END_SECONDS)
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


STREAM_SECONDS = 3600.0
"""Longest silence of one stream, which may wait behind many others. That the server as a whole
still says something is watched by `streams`."""

BUSY = 503
TEXT_SHOWN = 400


class ServerRefusedError(RuntimeError):
    """The server answered, and the answer is no."""

    def __init__(self, path: str, status: int, text: str) -> None:
        super().__init__(f"SGLang answered {path} with status {status}: {text[:TEXT_SHOWN]}")
        self.status = status


@dataclass(frozen=True, kw_only=True)
class ServerClient:
    """The server on `port` of this machine; the fields below are those of `rollout.server`."""

    port: int
    api_key: str
    timeout: float
    max_attempts: int
    retry_delay: float

    def call(self, path: str, body: Any = None, *, seconds: float | None = None) -> Any:
        """GET without a body, POST with one; the answer, decoded if it is JSON."""
        for attempt in range(1, self.max_attempts + 1):
            try:
                return self.call_once(path, body, seconds=seconds)
            except (ConnectionRefusedError, ServerRefusedError) as error:
                is_busy = isinstance(error, ConnectionRefusedError) or error.status == BUSY
                if not is_busy or attempt == self.max_attempts:
                    raise
                time.sleep(self.retry_delay)
        raise AssertionError("max_attempts is at least 1")

    def call_once(self, path: str, body: Any = None, *, seconds: float | None = None) -> Any:
        connection = self._send(path, body, seconds or self.timeout)
        try:
            response = connection.getresponse()
            text = response.read().decode()
            if response.status != http.client.OK:
                raise ServerRefusedError(path, response.status, text)
            kind = response.getheader("Content-Type") or ""
            return json.loads(text) if text and "json" in kind else text
        finally:
            connection.close()

    def stream(self, path: str, body: Any) -> Iterator[Any]:
        """The messages of a stream of events, as they come."""
        connection = self._send(path, body, STREAM_SECONDS)
        try:
            response = connection.getresponse()
            if response.status != http.client.OK:
                raise ServerRefusedError(path, response.status, response.read().decode())
            for line in response:
                if line.startswith(b"data: "):
                    content = line.removeprefix(b"data: ").strip()
                    if content != b"[DONE]":  # after it comes the end of the stream
                        yield json.loads(content)
        finally:
            connection.close()

    def _send(self, path: str, body: Any, seconds: float) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=seconds)
        headers = {"Authorization": f"Bearer {self.api_key}", "Content-Type": "application/json"}
        if body is None:
            connection.request("GET", path, headers=headers)
        else:
            connection.request("POST", path, body=json.dumps(body), headers=headers)
        return connection

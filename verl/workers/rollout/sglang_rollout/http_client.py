"""Calls to SGLang's server, with the standard library alone.

A call has its own connection and a deadline. It is sent again only where it certainly was not
taken: when nobody accepted the connection, or the server said that it is busy (503).
"""

import http.client
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

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

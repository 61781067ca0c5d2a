"""One JSON request to a service: one deadline for all of it, and a limit on the size of the reply.

Redirects are not followed and proxies not used. The functions block, so an event loop calls them in
threads.
"""

import json
import socket
import threading
from collections.abc import Mapping
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit


class RequestFailed(Exception):
    """No answer, or one that is no use; `status` is the HTTP status if there was one."""

    def __init__(self, text: str, status: int | None = None, *, was_sent: bool = True) -> None:
        super().__init__(text)
        self.status = status
        self.was_sent = was_sent
        """Whether the service may have seen the request."""


def post_json(
    url: str,
    payload: Mapping[str, Any],
    *,
    timeout_seconds: float,
    max_response_bytes: int,
    token: str = "",
) -> Any:
    """POST `payload`; the reply's JSON."""
    return request_json(
        "POST",
        url,
        payload,
        timeout_seconds=timeout_seconds,
        max_response_bytes=max_response_bytes,
        token=token,
    )


def request_json(
    method: str,
    url: str,
    payload: Mapping[str, Any] | None = None,
    *,
    timeout_seconds: float,
    max_response_bytes: int,
    token: str = "",
) -> Any:
    """The reply's JSON; `token` is sent as `Authorization: Bearer`."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"the address of the service is {url!r}; it must begin with http://")
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    connection = kind(parts.hostname, parts.port, timeout=timeout_seconds)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    body = None
    if payload is not None:
        body, headers["Content-Type"] = json.dumps(payload).encode(), "application/json"
    try:
        try:
            connection.connect()
        except OSError as error:
            text = f"{type(error).__name__}: {error}"
            raise RequestFailed(text, was_sent=False) from error
        try:
            status, content = _exchange(
                connection, (method, target, body, headers), timeout_seconds, max_response_bytes
            )
        except (OSError, HTTPException) as error:
            raise RequestFailed(f"{type(error).__name__}: {error}") from error
    finally:
        connection.close()
    if status != 200:
        raise RequestFailed(f"HTTP {status}: {content[:200].decode(errors='replace')}", status)
    if len(content) > max_response_bytes:
        raise RequestFailed(f"the answer has more than {max_response_bytes} bytes")
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise RequestFailed(f"the answer is not JSON: {error}") from error


def _exchange(
    connection: HTTPConnection,
    request: tuple[str, str, bytes | None, dict[str, str]],
    timeout_seconds: float,
    max_bytes: int,
) -> tuple[int, bytes]:
    """The time-out of a socket is for each read; the alarm ends a sender that drips."""
    expired = threading.Event()
    alarm = threading.Timer(timeout_seconds, _cut, (connection.sock, expired))
    alarm.daemon = True
    alarm.start()
    try:
        connection.request(*request)
        response = connection.getresponse()
        answer = response.status, response.read(max_bytes + 1)
    except (OSError, HTTPException) as error:
        if expired.is_set():
            raise TimeoutError(f"no answer within {timeout_seconds} s") from error
        raise
    finally:
        alarm.cancel()
    if expired.is_set():
        raise TimeoutError(f"no answer within {timeout_seconds} s")
    return answer


def _cut(connected: socket.socket, expired: threading.Event) -> None:
    expired.set()
    connected.shutdown(socket.SHUT_RDWR)

"""Ways to talk to a server: properly, and byte by byte."""

import http.client
import json
import socket
from typing import Any

from tests.server.engines import MODEL, TOKEN
from verl.server import RunningServer

SECONDS = 60.0


def call(
    server: RunningServer,
    path: str,
    body: Any = None,
    *,
    method: str | None = None,
    token: str | None = TOKEN,
    headers: dict[str, str] | None = None,
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers in small letters, and body of an answer."""
    sent = {"Authorization": f"Bearer {token}"} if token is not None else {}
    if body is not None:
        sent["Content-Type"] = "application/json"
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=SECONDS)
    try:
        verb = method or ("GET" if body is None else "POST")
        connection.request(verb, path, data, {**sent, **(headers or {})})
        answer = connection.getresponse()
        found = {name.lower(): value for name, value in answer.getheaders()}
        return answer.status, found, answer.read()
    finally:
        connection.close()


def complete(server: RunningServer, **fields: Any) -> tuple[int, dict[str, Any]]:
    """A request for completions, and the JSON that comes back."""
    body = {"model": MODEL, "prompt": "hello", **fields}
    status, _, answer = call(server, "/v1/completions", body)
    return status, json.loads(answer)


def chat(server: RunningServer, **fields: Any) -> tuple[int, dict[str, Any]]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], **fields}
    status, _, answer = call(server, "/v1/chat/completions", body)
    return status, json.loads(answer)


def connected(server: RunningServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=SECONDS)


def exchange(server: RunningServer, data: bytes) -> bytes:
    """Send bytes as they are, and read what comes until the server closes the connection."""
    with connected(server) as connection:
        connection.sendall(data)
        return until_closed(connection)


def until_closed(connection: socket.socket) -> bytes:
    received = b""
    try:
        while part := connection.recv(65536):
            received += part
    except ConnectionResetError:  # closed with our bytes unread
        return received
    return received

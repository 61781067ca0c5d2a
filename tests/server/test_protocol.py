"""Whoever sends slowly is disconnected, and does not keep others waiting."""

import socket
import time

import pytest

from tests.pace import wait_until
from tests.server.clients import call, connected, until_closed
from tests.server.engines import MODEL, TOKEN, ScriptedRollout, byte_tokenizer, saying
from verl.server import RunningServer, ServerOptions, serve

RECEIPT_SECONDS = 2.0
HEAD = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"
BODY_HEAD = HEAD + "Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n"


@pytest.fixture(scope="module")
def impatient():
    options = ServerOptions(
        model=MODEL, max_model_len=64, token=TOKEN, receipt_seconds=RECEIPT_SECONDS,
        keep_alive_seconds=1.0, max_connections=1200,
    )  # fmt: skip
    with serve([ScriptedRollout(saying("a"))], byte_tokenizer(), options) as server:
        yield server


def trickle(server: RunningServer, begin: str, more: bytes) -> float:
    """Seconds until the server ends a connection on which a byte comes every 0.1 s; 60 at most."""
    with connected(server) as connection:
        started = time.monotonic()
        connection.sendall(begin.encode())
        connection.settimeout(0.1)
        while time.monotonic() - started < 60:
            try:
                connection.sendall(more)
                if connection.recv(1000) == b"":
                    break
            except TimeoutError:
                continue
            except OSError:  # reset
                break
        return time.monotonic() - started


@pytest.mark.parametrize(
    ("begin", "more"),
    [("", b"G"), (HEAD, b"X"), (HEAD, b"X: y\r\n"), (BODY_HEAD, b" ")],
    ids=["first line", "header", "headers", "body"],
)
def test_a_request_that_trickles_in_is_cut_off(impatient, begin, more):
    assert RECEIPT_SECONDS - 0.1 < trickle(impatient, begin, more) < 60


def test_small_answers_are_sent_at_once(impatient):
    """Else a client that keeps its connection waits 40 ms for each: its acknowledgement is late."""
    with connected(impatient) as connection:
        connection.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        (protocol,) = impatient._server.server_state.connections
        accepted = protocol.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


def test_the_default_deadline_is_below_ten_seconds():
    assert ServerOptions(model=MODEL, max_model_len=64).receipt_seconds < 10


def test_a_thousand_half_open_connections_are_closed_and_disturb_nobody(impatient):
    held = [connected(impatient) for _ in range(1000)]
    try:
        for number, connection in enumerate(held):
            connection.sendall((HEAD if number % 2 else BODY_HEAD).encode())
        assert call(impatient, "/health")[0] == 200
        for connection in held:
            until_closed(connection)
    finally:
        for connection in held:
            connection.close()


def test_connections_beyond_the_limit_are_closed_at_once(impatient):
    held = [connected(impatient) for _ in range(1300)]
    try:
        for connection in held[-50:]:
            connection.settimeout(5)
            assert until_closed(connection) == b""
    finally:
        for connection in held:
            connection.close()


def test_a_second_request_on_a_connection_has_its_own_deadline(impatient):
    request = f"GET /health HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
    with connected(impatient) as connection:
        for _ in range(2):
            connection.sendall(request.encode())
            answer = connection.recv(10_000)
            while b"engines_alive" not in answer:
                answer += connection.recv(10_000)
            assert b"200 OK" in answer
        connection.sendall(b"GET /health HT")
        assert until_closed(connection) == b""


def test_a_pipelined_request_without_its_end_is_cut_off_too(impatient):
    first = f"GET /health HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
    with connected(impatient) as connection:
        connection.sendall((first + BODY_HEAD).encode())
        assert b"200 OK" in until_closed(connection)


def test_an_idle_connection_is_closed(impatient):
    request = f"GET /health HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
    with connected(impatient) as connection:
        connection.sendall(request.encode())
        assert b"200 OK" in until_closed(connection)


def test_a_client_that_reads_nothing_is_dropped_when_its_time_is_over():
    options = ServerOptions(model=MODEL, max_model_len=100_000, token=TOKEN, request_seconds=1.0)
    engine = ScriptedRollout(lambda request: [80] * 99_000)
    body = f'{{"model": "{MODEL}", "prompt": "x", "max_tokens": 99000, "stream": true}}'
    with serve([engine], byte_tokenizer(), options) as server, connected(server) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        head = HEAD + f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall((head + body).encode())
        wait_until(lambda: engine.requests)
        wait_until(lambda: not engine.running and not server.service.admission.num_running)

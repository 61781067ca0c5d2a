"""The server of the page, the tools and the teachers: what strangers may cost it."""

import json
import socket
import threading

from verl.utils.json_server import JsonServer

SECONDS = 10.0


def sent(server, text=b""):
    connection = socket.create_connection(("127.0.0.1", server.port), SECONDS)
    connection.sendall(text)
    return connection


def reply(connection):
    with connection, connection.makefile("rb") as stream:
        status = int(stream.readline().split()[1])
        return status, json.loads(stream.read().partition(b"\r\n\r\n")[2])


def health(server):
    return reply(sent(server, b"GET /health HTTP/1.0\r\nHost: localhost\r\n\r\n"))


def test_connections_that_send_nothing_count_and_get_no_thread():
    with JsonServer({}, token="", max_connections=3, receipt_seconds=SECONDS) as server:
        silent = [sent(server) for _ in range(3)]
        for _ in range(20):
            assert health(server)[0] == 503
        assert sum("process_request" in thread.name for thread in threading.enumerate()) <= 3
        for connection in silent:
            connection.close()
        statuses = iter(lambda: health(server)[0], 200)  # once their threads have seen it
        assert all(status == 503 for status, _ in zip(statuses, range(1000), strict=False))
        assert health(server) == (200, {"status": "ok"})


def test_a_length_that_is_no_number_is_refused():
    with JsonServer({("POST", "/x"): lambda body: body}, token="") as server:
        for length in (b"\xb2", b"-1", b"9" * 5000, b"1_0", b"+5", b"0x5"):
            head = b"POST /x HTTP/1.0\r\nHost: localhost\r\nContent-Length: " + length
            assert reply(sent(server, head + b"\r\n\r\n{}"))[0] == 411, length
        right = b"POST /x HTTP/1.0\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}"
        assert reply(sent(server, right)) == (200, {})

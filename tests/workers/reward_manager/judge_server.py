"""A chat-completions server on the loopback interface, whose answers a test decides."""

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "a-key-for-tests"
Answer = str | tuple[int, str] | tuple[int, str, dict[str, str]]


class JudgeServer:
    """`answer(request)` gives the content of the completion, or a status with a raw body."""

    def __init__(self, answer: Callable[[dict[str, Any]], Answer]) -> None:
        self.answer = answer
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.times: list[float] = []
        self.num_open = self.most_open = 0
        self.lock = threading.Lock()
        self.url = ""

    def respond(self, handler: BaseHTTPRequestHandler) -> None:
        request = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        with self.lock:
            self.requests.append(request)
            self.headers.append(dict(handler.headers))
            self.times.append(time.monotonic())
            self.num_open += 1
            self.most_open = max(self.most_open, self.num_open)
        if handler.headers.get("Authorization") != f"Bearer {TOKEN}":
            answer: Answer = (401, "no such key")
        else:
            answer = self.answer(request)
        with self.lock:
            self.num_open -= 1
        if isinstance(answer, str):
            completion = {"choices": [{"message": {"role": "assistant", "content": answer}}]}
            answer = (200, json.dumps(completion))
        status, body, headers = (*answer, {})[:3]
        handler.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body.encode()))}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(body.encode())


@contextmanager
def judge_server(answer: Callable[[dict[str, Any]], Answer]) -> Iterator[JudgeServer]:
    judge = JudgeServer(answer)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            try:
                judge.respond(self)
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True  # the client did not wait

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    judge.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield judge
    finally:
        server.shutdown()
        thread.join(60)
        server.server_close()


def key_of(request: dict[str, Any]) -> str:
    """The key that the question carries, as a judge reads it."""
    return re.search(r"verdict-([0-9a-f]+)", request["messages"][0]["content"]).group(1)


def material_of(request: dict[str, Any]) -> dict[str, Any]:
    """The JSON between the two lines with the key."""
    key = key_of(request)
    text = request["messages"][1]["content"]
    return json.loads(text.removeprefix(f"BEGIN {key}\n").removesuffix(f"\nEND {key}"))


def verdict(request: dict[str, Any], score: Any, **further: Any) -> str:
    """The block that a well-behaved judge ends with."""
    return f"```verdict-{key_of(request)}\n{json.dumps({'score': score, **further})}\n```"

"""A service that speaks the Sandbox Fusion protocol and runs programs in our own sandbox.

`faults` is what it does instead, one per request: an HTTP status, the bytes of a body, or a
callable that gets the request handler.
"""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from verl.utils.sandbox import Limits, Sandbox

Fault = int | bytes | Callable[[BaseHTTPRequestHandler], None]
RUN_STATUS = {"finished": "Finished", "timeout": "TimeLimitExceeded"}


class FusionServer:
    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.faults: list[Fault] = []
        self.most_at_once = 0
        self._running = 0
        self._lock = threading.Lock()
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.address = f"http://127.0.0.1:{self.http.server_port}"
        self.url = f"{self.address}/run_code"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                server.answer(self, json.loads(body))

            def log_message(self, *_: object) -> None:
                """Quiet."""

        return Handler

    def answer(self, handler: BaseHTTPRequestHandler, request: dict[str, Any]) -> None:
        with self._lock:
            self.requests.append(request)
            self.paths.append(handler.path)
            self._running += 1
            self.most_at_once = max(self.most_at_once, self._running)
            fault = self.faults.pop(0) if self.faults else None
        body = json.dumps(execute(request)).encode() if fault is None else fault
        with self._lock:  # before the answer: who waits for it may ask again at once
            self._running -= 1
        if callable(body):
            body(handler)
        elif isinstance(body, int):
            reply(handler, body, b"gateway")
        else:
            reply(handler, 200, body)


def reply(handler: BaseHTTPRequestHandler, status: int, body: bytes) -> None:
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def execute(request: dict[str, Any]) -> dict[str, Any]:
    """What the real service answers; "cpp" stands for a language whose compiler refuses."""
    if request["language"] == "cpp":
        compiled = {"status": "Error", "execution_time": 0.1, "stderr": "error", "return_code": 1}
        return {"status": "Failed", "compile_result": compiled, "run_result": None}
    limits = Limits(
        timeout_seconds=request["run_timeout"], memory_mb=int(request["memory_limit_MB"])
    )
    result = Sandbox(limits).run(request["code"], request["stdin"].encode())
    run = {
        "status": RUN_STATUS.get(result.status, "Error"),
        "execution_time": result.duration_seconds,
        "stdout": result.stdout.decode(errors="replace"),
        "stderr": result.stderr.decode(errors="replace"),
        "return_code": result.exit_code,
    }
    status = "Success" if result.is_finished else "Failed"
    return {"status": status, "message": "", "compile_result": None, "run_result": run}


@contextmanager
def running_server() -> Iterator[FusionServer]:
    server = FusionServer()
    thread = threading.Thread(target=server.http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.http.shutdown()
        server.http.server_close()
        thread.join(60)

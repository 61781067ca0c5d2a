"""A small JSON-over-HTTP server on the standard library, for services that tools ask.

    connection -> host known? -> token right? -> body JSON and small enough? -> route -> JSON

It listens on this machine only and asks for a token, unless told otherwise. A request must arrive
whole within `receipt_seconds`; connections above `max_connections` are turned away with 503.
`GET /health` and the `pages` are open: pages hold no data, they ask for it with the token.
"""

import base64
import hashlib
import hmac
import ipaddress
import json
import logging
import re
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from verl.utils.exposition import CONTENT_TYPE
from verl.utils.py_functional import printable

logger = logging.getLogger(__name__)

Route = Callable[[Any], Any]
"""From the JSON of the body (None without one) to the JSON of the reply."""

MIN_TOKEN_CHARACTERS = 16
MAX_DROPPED_BYTES = 16 << 20
TOO_MANY = (
    b"HTTP/1.0 503 Service Unavailable\r\nContent-Type: application/json\r\n\r\n"
    b'{"error": "too many connections at once"}'
)


class Page(str):
    """HTML among the replies."""


class Metrics(str):
    """Text for Prometheus among the replies."""


class Events:
    """Server-sent events among the replies: JSON each, until `changes` ends or the client goes.

    None is a comment, which tells a client that is gone from one that waits.
    """

    def __init__(self, changes: Iterator[Any]) -> None:
        self.changes = changes


class Refusal(Exception):
    """What a route will not do: an HTTP status, and why."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class JsonServer:
    """`start` serves in a thread until `stop`; `serve_forever` serves in this one.

    `token` None makes one (`server.token`), "" asks for none, which only loopback allows.
    """

    def __init__(
        self,
        routes: Mapping[tuple[str, str], Route],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        pages: Mapping[str, str] | None = None,
        max_body_bytes: int = 1 << 20,
        max_connections: int = 256,
        receipt_seconds: float = 10.0,
    ) -> None:
        self.host = host
        self.token = secrets.token_urlsafe(24) if token is None else token
        if not self.token and not is_loopback(host):
            raise ValueError(
                f"a server on {host} can be reached from other machines and needs a token; "
                "give one, or listen on 127.0.0.1"
            )
        if self.token and len(self.token) < MIN_TOKEN_CHARACTERS:
            raise ValueError(f"the token must have {MIN_TOKEN_CHARACTERS} or more characters")
        self.routes = {("GET", "/health"): lambda _: {"status": "ok"}, **routes}
        self.pages = dict(pages or {})
        self.max_body_bytes = max_body_bytes
        self.receipt_seconds = receipt_seconds
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        places = threading.BoundedSemaphore(max_connections)
        kind = type("Server", (_HttpServer,), {"address_family": family, "places": places})
        self._http = kind((host, port), _handler(self))
        self._thread = threading.Thread(target=self.serve_forever, daemon=True)

    @property
    def port(self) -> int:
        return self._http.server_address[1]

    @property
    def url(self) -> str:
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    def start(self) -> "JsonServer":
        self._thread.start()
        return self

    def serve_forever(self) -> None:
        self._http.serve_forever(poll_interval=0.05)

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def __enter__(self) -> "JsonServer":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    # ---- one request -----------------------------------------------------------------------------

    def answer(self, request: BaseHTTPRequestHandler) -> tuple[int, Any]:
        is_read = False
        try:
            self._check_host(request)
            path = request.path.partition("?")[0]
            if request.command == "GET" and path in self.pages:
                return 200, Page(self.pages[path])
            route = self._route(request)
            body = self._body(request)
            is_read = True
            return 200, route(parsed(body))
        except Refusal as refusal:
            if not is_read:
                drop_body(request)
            return refusal.status, {"error": str(refusal)}
        except OSError as error:  # the client went, or sent too slowly
            return 408, {"error": f"the request did not arrive: {error}"}
        except Exception as error:
            logger.exception("%s %s failed", request.command, printable(request.path))
            return 500, {"error": f"{type(error).__name__}: {error}"[:1000]}

    def _check_host(self, request: BaseHTTPRequestHandler) -> None:
        """A page from elsewhere must not reach a local server through a name of its own."""
        name = (request.headers.get("Host") or "").rsplit(":", 1)[0].strip("[]").lower()
        if is_loopback(self.host) and name not in (self.host, "localhost", "127.0.0.1", "::1"):
            raise Refusal(403, "the Host header names another server")

    def _route(self, request: BaseHTTPRequestHandler) -> Route:
        key = request.command, request.path.partition("?")[0]
        if key != ("GET", "/health") and self.token:
            scheme, _, shown = (request.headers.get("Authorization") or "").partition(" ")
            right = hmac.compare_digest(shown.encode(), self.token.encode())
            if scheme.lower() != "bearer" or not right:
                raise Refusal(401, "this needs the server's token: Authorization: Bearer ...")
        if key not in self.routes:
            known = ", ".join(f"{method} {path}" for method, path in sorted(self.routes))
            raise Refusal(405, f"there is no {printable(' '.join(key))}; there are {known}")
        return self.routes[key]

    def _body(self, request: BaseHTTPRequestHandler) -> bytes:
        length = content_length(request)
        if request.headers.get("Transfer-Encoding") or length is None:
            raise Refusal(411, "send the body with its Content-Length")
        if length > self.max_body_bytes:
            raise Refusal(413, f"the body is longer than {self.max_body_bytes} bytes")
        return request.rfile.read(length)


def content_length(request: BaseHTTPRequestHandler) -> int | None:
    """None if the header is no number; 0 without one."""
    text = request.headers.get("Content-Length") or "0"
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None


def parsed(body: bytes) -> Any:
    if not body:
        return None
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"the body is not JSON: {error}") from error


def drop_body(request: BaseHTTPRequestHandler) -> None:
    """Read what the client still sends, and keep none of it: a connection that is closed before
    that loses the refusal."""
    left = min(content_length(request) or 0, MAX_DROPPED_BYTES)
    try:
        while left > 0 and (chunk := request.rfile.read(min(left, 1 << 16))):
            left -= len(chunk)
    except OSError:
        return  # it sends too slowly, or is gone: it gets no refusal


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name; where it leads is not ours to guess
        return False


def page_policy(text: str) -> str:
    """The Content-Security-Policy of the page."""
    return (
        f"default-src 'none'; style-src {hashes(text, 'style')}; "
        f"script-src {hashes(text, 'script')}; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    )


def hashes(text: str, tag: str) -> str:
    """Hashes of the text between the tags, as browsers compute them."""
    bodies = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(body.encode()).digest()) for body in bodies]
    return " ".join(f"'sha256-{digest.decode()}'" for digest in digests)


class _HttpServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512
    places: threading.BoundedSemaphore
    """One for each connection, from its first byte on: those that send nothing count too."""

    def process_request(self, request: Any, client_address: Any) -> None:
        if self.places.acquire(blocking=False):
            super().process_request(request, client_address)
            return
        with suppress(OSError):  # it is gone, or reads nothing
            request.setblocking(False)
            request.sendall(TOO_MANY)
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no event."""


def _handler(server: JsonServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = server.receipt_seconds

        def handle_one_request(self) -> None:
            self.alarm = threading.Timer(server.receipt_seconds, self._cut)
            self.alarm.daemon = True
            self.alarm.start()
            try:
                super().handle_one_request()
            finally:
                self.alarm.cancel()

        def _cut(self) -> None:
            try:
                self.connection.shutdown(socket.SHUT_RD)
            except OSError:
                return  # it has been closed

        def do_GET(self) -> None:
            self._reply(*server.answer(self))

        do_POST = do_GET

        def _reply(self, status: int, content: Any) -> None:
            self.alarm.cancel()
            if isinstance(content, Events):
                self._stream(content)
                return
            is_page, is_text = isinstance(content, Page), isinstance(content, Page | Metrics)
            body = content.encode() if is_text else json.dumps(content).encode()
            self.send_response(status)
            kind = "application/json"
            if is_text:
                kind = "text/html; charset=utf-8" if is_page else CONTENT_TYPE
            self.send_header("Content-Type", kind)
            if is_page:
                self.send_header("Content-Security-Policy", page_policy(content))
                self.send_header("Referrer-Policy", "no-referrer")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            self.wfile.write(body)

        def _stream(self, events: Events) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            for change in events.changes:
                text = ":\n\n" if change is None else f"data: {json.dumps(change)}\n\n"
                try:
                    self.wfile.write(text.encode())
                    self.wfile.flush()
                except OSError:
                    return  # the client is gone

        def log_message(self, format: str, *args: object) -> None:
            """Requests are not logged: they hold what the model wrote."""

    return Handler

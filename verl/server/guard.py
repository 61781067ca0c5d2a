"""What every request passes before any route sees it.

    host known? -> token right? -> body plain JSON and small enough? -> route
                                                                         |
    client gone or time over: the route's work is cancelled <------------+

Only `/livez` and the page at `/` are open. A refusal is decided from the headers where they
suffice; the body is then never read into memory. The order matters: without the token nobody learns
which routes exist.
"""

import asyncio
import hmac
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from verl.server.errors import ApiError
from verl.server.metrics import ServerMetrics
from verl.server.options import ServerOptions

logger = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Any, Receive, Send], Awaitable[None]]

OPEN_ROUTES = {"/": "GET", "/livez": "GET"}
HEADERS_OF_ALL = (
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
)
DELIVERY_SECONDS = 10.0
"""Beyond the time for an answer, before a connection that takes nothing is dropped."""


class Guard:
    """ASGI middleware around the whole application."""

    def __init__(
        self,
        app: App,
        options: ServerOptions,
        token: str,
        metrics: ServerMetrics,
        routes: frozenset[str],
    ) -> None:
        self._app = app
        self._options = options
        self._token = token.encode()
        self._metrics = metrics
        self._routes = routes

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # web sockets: uvicorn then refuses the handshake
            return
        started = time.monotonic()
        answer = Recorder(send)
        try:
            self._check_host(scope)
            self._check_token(scope)
            body = await self._body(scope, receive)
        except ApiError as error:
            await self._refuse(error, scope, answer)
        else:
            await self._answer(scope, body, receive, answer)
        route = scope["path"] if scope["path"] in self._routes else "other"
        self._metrics.requests.labels(route, str(answer.status)).inc()
        self._metrics.seconds.labels(route).observe(time.monotonic() - started)

    # ---- who asks --------------------------------------------------------------------------------

    def _check_host(self, scope: Any) -> None:
        """A page from elsewhere must not reach a local server through a name of its own."""
        host = header(scope, b"host").decode("latin-1").lower()
        name, colon, port = host.rpartition(":")
        if colon and port.isdigit():
            host = name
        if host not in self._options.known_hosts:
            message = "the Host header names another server; see allowed_hosts"
            raise ApiError(403, message, kind="permission_error", code="wrong_host")

    def _check_token(self, scope: Any) -> None:
        if OPEN_ROUTES.get(scope["path"]) == scope["method"]:
            return
        scheme, _, shown = header(scope, b"authorization").partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(shown, self._token):
            raise ApiError(
                401, "this needs the server's token: Authorization: Bearer ...",
                kind="authentication_error", code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )  # fmt: skip

    async def _refuse(self, error: ApiError, scope: Any, answer: "Recorder") -> None:
        await refuse(error.body(), error, answer)

    # ---- what is sent ----------------------------------------------------------------------------

    async def _body(self, scope: Any, receive: Receive) -> bytes:
        length, is_chunked = header(scope, b"content-length"), header(scope, b"transfer-encoding")
        if length and is_chunked:
            close = {"Connection": "close"}
            raise ApiError(400, "Content-Length and Transfer-Encoding exclude each other",
                           code="ambiguous_length", headers=close)  # fmt: skip
        if length and int(length) > self._options.max_body_bytes:
            raise self._too_large()
        self._check_form(scope, has_body=bool(is_chunked) or length not in (b"", b"0"))
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return b""
            body += message.get("body", b"")
            if len(body) > self._options.max_body_bytes:
                raise self._too_large()
            if not message.get("more_body", False):
                return bytes(body)

    def _check_form(self, scope: Any, *, has_body: bool) -> None:
        if header(scope, b"content-encoding").lower() not in (b"", b"identity"):
            raise ApiError(415, "compressed bodies are not taken", code="compressed_body")
        kind = header(scope, b"content-type").partition(b";")[0].strip().lower()
        if has_body and kind != b"application/json":
            raise ApiError(415, "the body must be application/json", code="unknown_form")

    def _too_large(self) -> ApiError:
        most = self._options.max_body_bytes
        return ApiError(413, f"the body is longer than {most} bytes", code="too_large")

    # ---- the answer ------------------------------------------------------------------------------

    async def _answer(self, scope: Any, body: bytes, receive: Receive, answer: "Recorder") -> None:
        """Run the route until it has answered, the client has gone or the time is over."""
        work = asyncio.ensure_future(self._app(scope, replayed(body), answer))
        gone = asyncio.ensure_future(until_gone(receive))
        most = self._options.request_seconds + DELIVERY_SECONDS
        try:
            await asyncio.wait({work, gone}, timeout=most, return_when=asyncio.FIRST_COMPLETED)
            if answer.is_complete:  # then "gone" only means that there is nothing left to send
                await asyncio.wait({work}, timeout=DELIVERY_SECONDS)
        finally:
            self._metrics.given_up.inc(int(not answer.is_complete))
            work.cancel()
            gone.cancel()
            await asyncio.wait({work, gone}, timeout=DELIVERY_SECONDS)
        error = work.exception() if work.done() and not work.cancelled() else None
        if error is not None:
            raise error


class Recorder:
    """`send`, with the headers that every answer has, and the status for the statistics."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0
        self.is_complete = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), *HEADERS_OF_ALL]
        await self._send(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.is_complete = True


async def refuse(content: Mapping[str, Any], error: ApiError, send: Send) -> None:
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    headers += [(name.lower().encode(), text.encode()) for name, text in error.headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def header(scope: Any, name: bytes) -> bytes:
    """The value of a header; the values of one that came twice, joined."""
    return b",".join(value for key, value in scope["headers"] if key == name)


def replayed(body: bytes) -> Receive:
    """What the route reads: the body, and then nothing more; that the client goes is seen here."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        return await asyncio.get_running_loop().create_future()

    return receive


async def until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

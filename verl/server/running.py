"""A server in a thread of its own, and connections that cannot be held open by sending slowly.

    serve() --> thread: uvicorn's event loop --> port and token are known --> serve() returns
    stop()  --> no new requests; those in flight get a few seconds; the thread ends

    connection or first byte -- receipt_seconds --> whole request, or the connection is closed
    response sent -- keep_alive_seconds --> next first byte, or the connection is closed

uvicorn has a deadline between requests but none within one, and a middleware sees a request only
after its headers. So the clock runs in the protocol, and it is absolute: another byte does not buy
more time. Engines are neither started nor closed here.
"""

import asyncio
import json
import secrets
import socket
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import h11
import uvicorn
from transformers import PreTrainedTokenizerBase
from uvicorn.protocols.http.h11_impl import H11Protocol

from verl.server.app import build_app
from verl.server.errors import ApiError
from verl.server.guard import App
from verl.server.options import ServerOptions
from verl.server.service import Service
from verl.utils.environment import server_token
from verl.workers.rollout.base import StreamingRollout

START_SECONDS = 30.0
STOP_SECONDS = 10.0
MAX_HEADER_BYTES = 64 << 10
BACKLOG = 1024


class RunningServer:
    """A server that answers until `stop`."""

    def __init__(
        self,
        service: Service,
        server: uvicorn.Server,
        listener: socket.socket,
        token: str,
        *,
        token_source: str | None,
    ):
        self.service = service
        self.token = token
        self._token_source = token_source
        self._server = server
        self._listener = listener
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)

    @property
    def port(self) -> int:
        return self._listener.getsockname()[1]

    @property
    def url(self) -> str:
        host = self.service.options.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def page_url(self) -> str:
        """Of the chat page, with the token behind `#`, which browsers keep to themselves. It is as
        secret as the token."""
        return f"{self.url}/#token={quote(self.token, safe='')}"

    def where(self) -> dict[str, str]:
        """What to print at the start. A token that was made here is shown this once; one that was
        given stays where it came from, and out of whatever records the output."""
        where = {"API": f"{self.url}/v1"}
        if self._token_source is None:
            return {**where, "token": self.token, "chat in the browser": self.page_url}
        token = f"the one in {self._token_source}"
        return {**where, "token": token, "chat in the browser": f"{self.url}/"}

    def start(self) -> None:
        self._thread.start()
        pause = threading.Event()
        for _ in range(int(START_SECONDS / 0.02)):
            if self._server.started or self._has_ended.is_set():
                break
            pause.wait(0.02)
        if not self._server.started:
            raise RuntimeError("the server did not start; its log says why")

    def stop(self) -> None:
        """End; requests that are still running then are cut off."""
        self._server.should_exit = True
        self._thread.join(timeout=2 * STOP_SECONDS)
        if self._thread.is_alive():
            raise RuntimeError("the server did not end in time")

    def wait(self, seconds: float) -> bool:
        """Whether the server has ended within this time."""
        return self._has_ended.wait(seconds)

    def __enter__(self) -> "RunningServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _run(self) -> None:
        try:
            asyncio.run(self._server.serve(sockets=[self._listener]))
        finally:
            self._listener.close()
            self._has_ended.set()


def serve(
    rollouts: Sequence[StreamingRollout],
    tokenizer: PreTrainedTokenizerBase,
    options: ServerOptions,
    processor: Any = None,
) -> RunningServer:
    """Serve a model from engines that hold it; `processor` is that of a model which sees.

    Without a token in the options or in `VERL_SERVER_TOKEN` one is made; `RunningServer.token`
    tells it.
    """
    source = "the options" if options.token else "VERL_SERVER_TOKEN" if server_token() else None
    options = replace(options, token=options.token or server_token() or secrets.token_urlsafe(32))
    token = str(options.token)
    service = Service(rollouts, tokenizer, options, processor=processor)
    config = uvicorn_config(build_app(service, token), options)
    listener = listening_socket(options)
    server = RunningServer(service, uvicorn.Server(config), listener, token, token_source=source)
    server.start()
    return server


def uvicorn_config(app: App, options: ServerOptions) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=punctual(options.receipt_seconds, options.max_connections),
        ws="none",
        loop="asyncio",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=options.keep_alive_seconds,  # pyright: ignore[reportArgumentType]
        timeout_graceful_shutdown=int(STOP_SECONDS),
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        backlog=BACKLOG,
    )


def listening_socket(options: ServerOptions) -> socket.socket:
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    # With the protocol named, asyncio sends small answers at once (TCP_NODELAY) on what it accepts.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((options.host, options.port))
    except OSError as error:
        listener.close()
        raise ValueError(
            f"cannot listen on {options.host} port {options.port}: {error.strerror}; choose "
            "another port, or 0 for a free one"
        ) from error
    return listener


RECEIVING = (h11.IDLE, h11.SEND_BODY)
"""What h11 says of a client whose request has not come to its end."""


class PunctualProtocol(H11Protocol):
    """One connection; subclassed once per server by `punctual` to set its limits."""

    receipt_seconds: float = 8.0
    max_connections: int = 2048

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            transport.abort()
        else:
            self._start_clock()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._follow()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:  # a pipelined request has begun
            self._follow()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """What is not HTTP gets an error object too, in place of uvicorn's text."""
        body = json.dumps(ApiError(400, msg, code="invalid_http").body()).encode()
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        response = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _follow(self) -> None:
        if self.conn.their_state not in RECEIVING:
            self._stop_clock()
        elif self._deadline is None:
            self._start_clock()

    def _start_clock(self) -> None:
        self._deadline = self.loop.call_later(self.receipt_seconds, self._give_up)

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        # Not close(): whoever sends slowly may read slowly too, and would keep us flushing.
        self._deadline = None
        self.transport.abort()


def punctual(receipt_seconds: float, max_connections: int) -> type[PunctualProtocol]:
    """The class that uvicorn makes connections of, with these limits."""
    limits = {"receipt_seconds": receipt_seconds, "max_connections": max_connections}
    return type("PunctualProtocol", (PunctualProtocol,), limits)

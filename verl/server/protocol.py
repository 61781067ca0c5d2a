"""HTTP connections that cannot be held open by sending slowly.

    connection or first byte -- receipt_seconds --> whole request, or the connection is closed
    answer sent -- keep_alive_seconds --> next first byte, or the connection is closed

uvicorn has a deadline between requests but none within one, and a middleware sees a request only
after its headers have come. So the clock runs here, below both. It is absolute: another byte does
not buy more time.
"""

import asyncio
import json
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from verl.server.errors import ApiError

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

"""An answer that is sent while it is made, as server-sent events.

The first event is waited for before anything is sent, so that a request that cannot be served gets
a status of its own. Whatever fails later is the last event, an error object; a stream that went
well ends with `[DONE]`.
"""

import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from pydantic import BaseModel
from starlette.responses import Response

from verl.server.errors import ApiError

CONTENT_TYPE = "text/event-stream"
DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """Sends each object of `events`; the iterator is closed when the client goes."""

    media_type = CONTENT_TYPE

    def __init__(self, events: AsyncIterator[BaseModel]) -> None:
        super().__init__()
        self._events = events
        del self.headers["content-length"]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async with aclosing(self._events) as events:  # pyright: ignore[reportArgumentType]
            first = await anext(events)  # ApiError: nothing has been sent, so it has a status
            start = {"status": self.status_code, "headers": self.raw_headers}
            await send({"type": "http.response.start", **start})
            await self._send_body(first, send)
            end = DONE
            try:
                async for event in events:
                    await self._send_body(event, send)
            except ApiError as error:
                end = encoded(json.dumps(error.body()))
        # After the run has left the engines: whoever has the whole answer finds them free.
        await send({"type": "http.response.body", "body": end, "more_body": False})

    async def _send_body(self, event: BaseModel, send: Any) -> None:
        body = encoded(event.model_dump_json())
        await send({"type": "http.response.body", "body": body, "more_body": True})


def encoded(text: str) -> bytes:
    return b"data: " + text.encode() + b"\n\n"

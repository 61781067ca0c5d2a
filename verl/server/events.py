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
    """Sends each object of `events`; the iterator is closed when the client goes.

    With `is_named` the events are mappings whose `type` is the name of the event, and the stream
    ends with the last of them.
    """

    media_type = CONTENT_TYPE

    def __init__(
        self,
        events: AsyncIterator[BaseModel | dict[str, Any]],
        *,
        is_named: bool = False,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(headers=headers)
        self._events = events
        self._is_named = is_named
        del self.headers["content-length"]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async with aclosing(self._events) as events:  # pyright: ignore[reportArgumentType]
            first = await anext(events)  # ApiError: nothing has been sent, so it has a status
            start = {"status": self.status_code, "headers": self.raw_headers}
            await send({"type": "http.response.start", **start})
            await self._send_body(first, send)
            end = b"" if self._is_named else DONE
            try:
                async for event in events:
                    await self._send_body(event, send)
            except ApiError as error:
                end = self._encoded(
                    {"type": "error", **error.body()} if self._is_named else error.body()
                )
        # After the run has left the engines: whoever has the whole answer finds them free.
        await send({"type": "http.response.body", "body": end, "more_body": False})

    async def _send_body(self, event: BaseModel | dict[str, Any], send: Any) -> None:
        body = self._encoded(event)
        await send({"type": "http.response.body", "body": body, "more_body": True})

    def _encoded(self, event: BaseModel | dict[str, Any]) -> bytes:
        if isinstance(event, BaseModel):
            return encoded(event.model_dump_json())
        name = b"event: " + event["type"].encode() + b"\n" if self._is_named else b""
        return name + encoded(json.dumps(event, ensure_ascii=False))


def encoded(text: str) -> bytes:
    return b"data: " + text.encode() + b"\n\n"

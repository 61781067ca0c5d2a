"""Those who wait for the engine's process: for the answer to a call, or for a request's tokens.

Filled by the thread that reads the line; waited for on any other thread or event loop. That thread
answers everything in the end, if only with the news that the process is lost.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from verl.workers.rollout.base import GenerationRequest, OnEnd, TokenDelta, TokenOutput

OnDelta = Callable[[TokenDelta | None], None]
"""Told of every delta, and of None when there will be no more."""


class PendingCall:
    """`future` gets the answer, or the error."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.future: Future[Any] = Future()
        self.future.set_running_or_notify_cancel()  # who no longer waits must not disturb

    def succeed(self, value: Any) -> None:
        self.future.set_result(value)

    def fail(self, error: Exception) -> None:
        self.future.set_exception(error)


class PendingRequest(PendingCall):
    """Puts the deltas of a request together; `future` gets the list of its samples."""

    def __init__(
        self,
        number: int,
        request: GenerationRequest,
        on_delta: OnDelta | None = None,
        on_end: OnEnd | None = None,
    ) -> None:
        super().__init__(number)
        self.request = request
        self._outputs = [TokenOutput() for _ in range(request.num_samples)]
        self._on_delta = on_delta
        self._on_end = on_end

    def add(self, delta: TokenDelta) -> bool:
        """True when this was the last of all."""
        output = self._outputs[delta.sample]
        output.token_ids += delta.token_ids
        output.log_probs += delta.log_probs
        output.policy_versions += delta.policy_versions
        output.stop_reason = delta.stop_reason
        is_finished = all(output.stop_reason for output in self._outputs)
        if self._on_delta is not None:
            self._on_delta(delta)
        if self._on_end is not None and output.stop_reason:
            self._on_end(delta.sample, output)
        if is_finished:
            self.succeed(self._outputs)
        return is_finished

    def succeed(self, value: Any) -> None:
        super().succeed(value)
        self._tell_end()

    def fail(self, error: Exception) -> None:
        super().fail(error)
        self._tell_end()

    def _tell_end(self) -> None:
        if self._on_delta is not None:
            self._on_delta(None)


class DeltaFeed:
    """From the reading thread to one coroutine of an event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._arrived: deque[TokenDelta | None] = deque()
        self._news: asyncio.Future[None] = loop.create_future()

    def put(self, delta: TokenDelta | None) -> None:
        """Called on the reading thread."""
        with suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(self._take, delta)

    async def next(self) -> TokenDelta | None:
        """None when there will be no more."""
        while not self._arrived:
            self._news = self._loop.create_future()
            await self._news
        return self._arrived.popleft()

    def _take(self, delta: TokenDelta | None) -> None:
        self._arrived.append(delta)
        if not self._news.done():
            self._news.set_result(None)

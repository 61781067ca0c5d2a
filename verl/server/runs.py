"""The prompts of one HTTP request on the fleet.

    prompt 0 --stream or generate--+
    prompt 1 --stream or generate--+--> queue --> the route that writes the response
    prompt 2 --stream or generate--+

A response in events forwards tokens as they come; once some were forwarded, the loss of the engine
ends the request. A response as a whole takes whole samples, which the fleet retries elsewhere.
Leaving the `with` block cancels what still runs: a client that disconnects frees its slot at once.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

import anyio

from verl.server.errors import ApiError, internal_error, too_slow, unavailable
from verl.server.metrics import ServerMetrics
from verl.workers.rollout.base import EngineLostError, GenerationRequest, TokenDelta
from verl.workers.rollout.fleet import Fleet
from verl.workers.weight_sync.bucket import WeightsNotReadyError

logger = logging.getLogger(__name__)

LEAVE_SECONDS = 10.0
"""Time for engines to abort requests that nobody waits for."""


@dataclass(frozen=True)
class Event:
    """Tokens of a sample of a prompt, or its error; neither when the prompt is finished."""

    prompt: int
    delta: TokenDelta | None = None
    error: ApiError | None = None


class Deltas(Protocol):
    """Tokens of a request as a route reads them: `async with`, then `next` until it gives None."""

    async def __aenter__(self) -> "Deltas": ...

    async def __aexit__(self, *_: object) -> None: ...

    async def next(self) -> tuple[int, TokenDelta] | None: ...


class Run:
    """Requests in flight; `async with`, then `next` until it gives None."""

    def __init__(
        self,
        fleet: Fleet,
        requests: Sequence[GenerationRequest],
        metrics: ServerMetrics,
        *,
        is_streamed: bool,
        seconds: float,
    ) -> None:
        self._fleet = fleet
        self._requests = requests
        self._metrics = metrics
        self._is_streamed = is_streamed
        self._seconds = seconds
        self._tasks: list[asyncio.Task[None]] = []
        self._num_open = len(requests)
        self._send, self._receive = anyio.create_memory_object_stream[Event](math.inf)

    async def __aenter__(self) -> "Run":
        loop = asyncio.get_running_loop()
        self._deadline = loop.time() + self._seconds
        self._tasks = [loop.create_task(self._produce(n)) for n in range(len(self._requests))]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks, timeout=LEAVE_SECONDS)
        self._send.close()
        self._receive.close()

    async def next(self) -> tuple[int, TokenDelta] | None:
        """The next tokens, with the number of their prompt. ApiError if the request failed.

        Not with `asyncio.wait_for`: before Python 3.12 that forgets a cancellation that comes
        together with tokens, and the engine would go on for a client that has gone.
        """
        while self._num_open:
            left = self._deadline - asyncio.get_running_loop().time()
            try:
                with anyio.fail_after(left):
                    event = await self._receive.receive()
            except TimeoutError:
                raise too_slow(self._seconds) from None
            if event.delta is not None:
                return event.prompt, event.delta
            if event.error is not None:
                raise event.error
            self._num_open -= 1
        return None

    async def _produce(self, prompt: int) -> None:
        has_begun = False
        try:
            if not self._fleet.num_in_service():
                raise unavailable("no engine is alive; they are being restarted", "engine_lost")
            deltas = self._stream(prompt) if self._is_streamed else self._whole(prompt)
            async with aclosing(deltas):
                async for delta in deltas:
                    has_begun = True
                    self._metrics.generated_tokens.inc(len(delta.token_ids))
                    self._send.send_nowait(Event(prompt, delta))
        except Exception as error:
            self._send.send_nowait(Event(prompt, error=api_error(error, has_begun=has_begun)))
            return
        self._send.send_nowait(Event(prompt))

    async def _stream(self, prompt: int) -> AsyncGenerator[TokenDelta, None]:
        started = time.monotonic()
        async with aclosing(self._fleet.stream(self._requests[prompt])) as deltas:
            async for delta in deltas:
                if started is not None:
                    self._metrics.first_token_seconds.observe(time.monotonic() - started)
                    started = None
                yield delta

    async def _whole(self, prompt: int) -> AsyncGenerator[TokenDelta, None]:
        """One delta per sample, with all of its tokens."""
        for sample, output in enumerate(await self._fleet.generate(self._requests[prompt])):
            yield output.after(0, sample)


def api_error(error: Exception, *, has_begun: bool) -> ApiError:
    """What the client is told; nothing of an engine's message is passed on."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineLostError):
        if has_begun:
            message = "the engine was lost after the response had begun; send the request again"
            return ApiError(502, message, kind="server_error", code="engine_lost")
        return unavailable("engines were lost again and again", "engine_lost")
    if isinstance(error, WeightsNotReadyError):
        return unavailable("the model's weights are being replaced", "no_weights")
    if isinstance(error, ValueError):
        logger.warning("an engine refused a request: %s", error)
        return ApiError(400, "the engine cannot run this request", code="refused")
    logger.error("a request failed", exc_info=error)
    return internal_error()

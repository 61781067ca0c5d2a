"""The prompts of one HTTP request, under way on the engines.

    prompt 0 --pool.run--+
    prompt 1 --pool.run--+--> news --> whoever answers the client
    prompt 2 --pool.run--+

For an answer in events, news are what has come since the last ones. For an answer as a whole, they
are whole samples, so that a prompt whose engine is lost can begin anew. Leaving the `with` block
ends what still runs: a client that goes away gives its place back at once.
"""

import asyncio
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

import anyio
from anyio.streams.memory import MemoryObjectSendStream

from verl.server.errors import ApiError, internal_error, too_slow
from verl.server.pool import EnginePool, Receiver
from verl.workers.rollout.base import GenerationRequest, TokenDelta

logger = logging.getLogger(__name__)

LEAVE_SECONDS = 10.0
"""Time for engines to take back requests that nobody waits for."""


@dataclass(frozen=True)
class News:
    """Tokens of a sample of a prompt, or why there will be none; neither: the prompt is done."""

    prompt: int
    delta: TokenDelta | None = None
    error: Exception | None = None


class Run:
    """Requests under way; `async with`, then `next` until it gives None."""

    def __init__(
        self,
        pool: EnginePool,
        requests: Sequence[GenerationRequest],
        *,
        is_streamed: bool,
        seconds: float,
        key: str | None = None,
    ) -> None:
        self._pool = pool
        self._requests = requests
        self._is_streamed = is_streamed
        self._seconds = seconds
        self._key = key
        self._tasks: list[asyncio.Task[None]] = []
        self._num_open = len(requests)
        self._send, self._receive = anyio.create_memory_object_stream[News](math.inf)

    async def __aenter__(self) -> "Run":
        loop = asyncio.get_running_loop()
        self._deadline = loop.time() + self._seconds
        self._tasks = [loop.create_task(self._produce(n)) for n in range(len(self._requests))]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks, timeout=LEAVE_SECONDS)
        self._send.close()
        self._receive.close()

    async def next(self) -> tuple[int, TokenDelta] | None:
        """The next tokens, with the number of their prompt. ApiError if the request failed."""
        while self._num_open:
            left = self._deadline - asyncio.get_running_loop().time()
            try:
                news = await asyncio.wait_for(self._receive.receive(), timeout=left)
            except asyncio.TimeoutError:  # another class than the built-in one before Python 3.11
                raise too_slow(self._seconds) from None
            if news.delta is not None:
                return news.prompt, news.delta
            if news.error is not None:
                raise _for_client(news.error)
            self._num_open -= 1
        return None

    async def _produce(self, prompt: int) -> None:
        whole = Whole()
        receiver = Forwarded(self._send, prompt) if self._is_streamed else whole
        try:
            await self._pool.run(self._requests[prompt], receiver, self._key)
        except Exception as error:
            self._send.send_nowait(News(prompt, error=error))
            return
        for delta in whole.deltas():
            self._send.send_nowait(News(prompt, delta))
        self._send.send_nowait(News(prompt))


class Forwarded(Receiver):
    """Passes everything on at once."""

    def __init__(self, send: MemoryObjectSendStream[News], prompt: int) -> None:
        self._send = send
        self._prompt = prompt
        self._has_begun = False

    def add(self, delta: TokenDelta) -> None:
        self._has_begun = True
        self._send.send_nowait(News(self._prompt, delta))

    def start_over(self) -> bool:
        return not self._has_begun


class Whole(Receiver):
    """Keeps everything until the end."""

    def __init__(self) -> None:
        self._samples: dict[int, list[TokenDelta]] = {}

    def add(self, delta: TokenDelta) -> None:
        self._samples.setdefault(delta.sample, []).append(delta)

    def start_over(self) -> bool:
        self._samples.clear()
        return True

    def deltas(self) -> list[TokenDelta]:
        """One for each sample, with all of it."""
        return [_joined(deltas) for _, deltas in sorted(self._samples.items())]


def _joined(deltas: Sequence[TokenDelta]) -> TokenDelta:
    return TokenDelta(
        sample=deltas[0].sample,
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        log_probs=tuple(value for delta in deltas for value in delta.log_probs),
        policy_versions=tuple(one for delta in deltas for one in delta.policy_versions),
        stop_reason=deltas[-1].stop_reason,
    )


def _for_client(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    logger.error("a request failed", exc_info=error)
    return internal_error()

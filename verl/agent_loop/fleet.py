"""The engines of a run: how much each has to do, and which of them are out of service.

    a request fails with EngineLostError --> report: out of service --> recover, on a thread
    who needs an engine                  --> choose: the one with least to do; if all are out,
                                             wait until one is back

What an engine has to do is counted in tokens: those of the prompts, and all that may still come.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from verl.workers.rollout.base import EngineLostError, GenerationRequest, Rollout

Recover = Callable[[Rollout], None]
"""Starts a lost engine again and gives it the current weights; returns when it can be asked."""

LOOK_SECONDS = 10.0
"""Recoveries have deadlines of their own; this is how often those who wait look up."""

logger = logging.getLogger(__name__)


class Fleet:
    """Used on one event loop. Without `recover` a lost engine stays out of service."""

    def __init__(self, engines: Sequence[Rollout], recover: Recover | None = None) -> None:
        if not engines:
            raise ValueError("there is no rollout engine to send prompts to")
        self.engines = list(engines)
        self.load = [0] * len(self.engines)  # tokens
        self._recover = recover
        self._out: dict[int, asyncio.Task[None]] = {}  # engine -> its recovery
        self._num_losses = [0] * len(self.engines)
        self._one_at_a_time = asyncio.Lock()

    async def choose(self, preferred: int | None = None) -> int:
        """The engine to ask: the preferred one, or else that with least to do."""
        while True:
            present = [place for place in range(len(self.engines)) if place not in self._out]
            if preferred in present:
                return preferred
            if present:
                return min(present, key=self.load.__getitem__)
            await self._wait_for_any()

    @contextmanager
    def asking(self, place: int, request: GenerationRequest) -> Iterator[None]:
        """Count the request as the engine's; if the engine is lost meanwhile, recover it."""
        tokens = len(request.prompt_ids) + request.num_samples * request.params.max_tokens
        losses = self._num_losses[place]
        self.load[place] += tokens
        try:
            yield
        except EngineLostError as error:
            if losses == self._num_losses[place]:  # else another request has told of this loss
                self._take_out(place, error)
            raise
        finally:
            self.load[place] -= tokens

    def _take_out(self, place: int, error: EngineLostError) -> None:
        logger.warning("rollout engine %d is lost: %s", place, error)
        self._num_losses[place] += 1
        recovery = self._out[place] = asyncio.create_task(self._bring_back(place, error))
        recovery.add_done_callback(lambda task: log_failure(place, task))

    async def _bring_back(self, place: int, error: EngineLostError) -> None:
        if self._recover is None:
            raise error
        async with self._one_at_a_time:  # all ranks take part in each
            await asyncio.to_thread(self._recover, self.engines[place])
        del self._out[place]

    async def _wait_for_any(self) -> None:
        """Until an engine is back; raises when none will be."""
        recoveries = set(self._out.values())
        failed = [recovery for recovery in recoveries if recovery.done()]
        if len(failed) == len(recoveries):
            failure = failed[0].exception()
            raise EngineLostError(
                f"all {len(self.engines)} rollout engines are lost, and none could be started "
                f"again: {failure}"
            ) from failure
        waiting = recoveries.difference(failed)
        await asyncio.wait(waiting, timeout=LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)


def log_failure(place: int, recovery: asyncio.Task[None]) -> None:
    if not recovery.cancelled() and recovery.exception() is not None:
        logger.error("rollout engine %d stays lost: %s", place, recovery.exception())

"""Which engine continues which prompt, and what happens when an engine is lost.

    run --> the engine with the fewest tokens still to compute
             |          (or the one that knows the prompt's beginning, if it is about as free)
             +-- deltas --> receiver
             +-- lost ----> nothing has been passed on: another engine begins anew
                            something has: the request ends with a typed error
    lost engine --> started again in a thread, a few times; until then it gets nothing

Everything here runs on the server's event loop, so nothing is locked.
"""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from verl.server.errors import ApiError, unavailable
from verl.server.metrics import ServerMetrics
from verl.workers.rollout.base import (
    EngineLostError,
    GenerationRequest,
    StreamingRollout,
    TokenDelta,
)
from verl.workers.weight_sync.errors import WeightsNotReadyError

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
MAX_REMEMBERED = 10_000
PREFIX_TOKENS = 64
"""Prompts that begin with the same tokens, so many of them, are better served by one engine."""

RESTART_PAUSE_SECONDS = 1.0


@runtime_checkable
class Supervised(Protocol):
    """An engine in a process of its own, which can die and be started again."""

    def is_alive(self) -> bool: ...

    def restart(self) -> None: ...


class Receiver(ABC):
    """Takes what an engine generates for one prompt."""

    @abstractmethod
    def add(self, delta: TokenDelta) -> None: ...

    @abstractmethod
    def start_over(self) -> bool:
        """Forget everything; False if some of it has been passed on already."""


@dataclass
class Member:
    """One engine."""

    number: int
    engine: StreamingRollout
    process: Supervised | None
    """The same engine, if it can die."""

    outstanding: int = 0
    """Tokens of its requests, prompt and response, that may still have to be computed."""

    is_lost: bool = False
    num_restarts: int = 0
    """Since it last finished a request."""

    restart: "asyncio.Task[None] | None" = field(default=None, repr=False)

    def is_alive(self) -> bool:
        return not self.is_lost and (self.process is None or self.process.is_alive())


class EnginePool:
    """Spreads requests over engines."""

    def __init__(
        self, engines: Sequence[StreamingRollout], metrics: ServerMetrics, max_restarts: int = 3
    ) -> None:
        if not engines:
            raise ValueError("there is no engine to serve from; give at least one")
        self.members = [
            Member(number, engine, engine if isinstance(engine, Supervised) else None)
            for number, engine in enumerate(engines)
        ]
        self._metrics = metrics
        self._max_restarts = max_restarts
        self._home: OrderedDict[object, int] = OrderedDict()  # beginning of a prompt -> engine
        self._report()

    async def run(
        self, request: GenerationRequest, receiver: Receiver, key: str | None = None
    ) -> None:
        """Have one prompt continued; `key` names what it belongs to."""
        home = key if key is not None else tuple(request.prompt_ids[:PREFIX_TOKENS])
        for attempt in range(MAX_ATTEMPTS):
            member = self._choose(request, home)
            self._metrics.redispatched.inc(1 if attempt else 0)
            try:
                await self._run_on(member, request, receiver)
                return
            except EngineLostError as error:
                self._lose(member, error)
                if not receiver.start_over():
                    raise _lost_midway() from error
            except WeightsNotReadyError as error:
                raise unavailable("the model's weights are being replaced", "no_weights") from error
            except ValueError as error:
                logger.warning("engine %d refused a request: %s", member.number, error)
                raise ApiError(400, "the engine cannot run this request", code="refused") from error
        raise unavailable("engines were lost again and again", "engine_lost")

    def num_alive(self) -> int:
        """How many engines answer. One that has died unnoticed is started again."""
        for member in self.members:
            if not member.is_lost and not member.is_alive():
                self._lose(member, EngineLostError("its process has ended"))
        self._report()
        return sum(member.is_alive() for member in self.members)

    def close(self) -> None:
        for member in self.members:
            if member.restart is not None:
                member.restart.cancel()

    # ---- choosing --------------------------------------------------------------------------------

    def _choose(self, request: GenerationRequest, home: object) -> Member:
        if not self.num_alive():
            raise unavailable("no engine is alive; they are being started again", "engine_lost")
        alive = [member for member in self.members if member.is_alive()]
        chosen = min(alive, key=lambda member: member.outstanding)
        before = self._home.get(home)
        for member in alive:
            # To compute the prompt again elsewhere costs as much as to wait for so many tokens.
            slack = len(request.prompt_ids)
            if member.number == before and member.outstanding <= chosen.outstanding + slack:
                chosen = member
        self._home[home] = chosen.number
        self._home.move_to_end(home)
        while len(self._home) > MAX_REMEMBERED:
            self._home.popitem(last=False)
        return chosen

    async def _run_on(self, member: Member, request: GenerationRequest, receiver: Receiver) -> None:
        remaining = len(request.prompt_ids) + request.num_samples * request.params.max_tokens
        member.outstanding += remaining
        self._metrics.engine_requests.labels(str(member.number)).inc()
        started, has_begun = time.monotonic(), False
        try:
            async with aclosing(member.engine.stream(request)) as deltas:  # pyright: ignore[reportArgumentType]
                async for delta in deltas:
                    if not has_begun:
                        self._metrics.first_token_seconds.observe(time.monotonic() - started)
                        has_begun = True
                    num_new = min(len(delta.token_ids), remaining)
                    remaining -= num_new
                    member.outstanding -= num_new
                    self._metrics.generated_tokens.inc(len(delta.token_ids))
                    receiver.add(delta)
            member.num_restarts = 0
        finally:
            member.outstanding -= remaining
            self._report()

    # ---- losing ----------------------------------------------------------------------------------

    def _lose(self, member: Member, error: EngineLostError) -> None:
        """All its requests come here; the first one has it started again."""
        if member.is_lost:
            return
        logger.warning("engine %d is lost: %s", member.number, error)
        member.is_lost = True
        self._metrics.engine_lost.labels(str(member.number)).inc()
        self._report()
        if member.process is not None:
            loop = asyncio.get_running_loop()
            member.restart = loop.create_task(self._restart(member, member.process))

    async def _restart(self, member: Member, process: Supervised) -> None:
        while member.num_restarts < self._max_restarts:
            member.num_restarts += 1
            try:
                await asyncio.to_thread(process.restart)
                member.is_lost = False
                break
            except (RuntimeError, OSError, ValueError) as error:
                logger.warning("engine %d did not start: %s", member.number, error)
                await asyncio.sleep(RESTART_PAUSE_SECONDS * member.num_restarts)
        else:
            logger.error("engine %d is given up after %d starts", member.number, self._max_restarts)
        self._report()

    def _report(self) -> None:
        for member in self.members:
            name = str(member.number)
            self._metrics.engine_tokens.labels(name).set(member.outstanding)
            self._metrics.engine_alive.labels(name).set(int(not member.is_lost))


def _lost_midway() -> ApiError:
    message = "the engine was lost after it had begun to answer; send the request again"
    return ApiError(502, message, kind="server_error", code="engine_lost")

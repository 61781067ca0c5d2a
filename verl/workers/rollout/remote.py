"""A rollout engine in another process, seen from the driver as if it were here.

    generate(a) --+                          generate(a) --+
    generate(b) --+--> visit on a thread --> generate(c) --+--> visit on a thread --> ...
                       (the event loop is free: loops run, graders grade)

The driver keeps what was asked and who waits for it; the engine's process keeps the sequences
(`visits`). One visit at a time: the first who waits starts the exchange, which goes on as long as
somebody waits. Nobody waits for the exchange itself; a visit that fails is told to all who wait. An
engine that its rank has lost is `EngineLostError` here too: it may be asked again after a restart.
"""

import asyncio
import itertools
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from verl.single_controller.base.failures import WorkerError
from verl.single_controller.base.worker_group import WorkerGroup
from verl.workers.rollout.base import EngineLostError, GenerationRequest, Rollout, TokenOutput
from verl.workers.rollout.visits import Visit, VisitReport

VISIT_SECONDS = 900.0
"""A visit is a few steps; only the prefill of very long prompts on a CPU takes minutes."""

PAUSE_SECONDS = 0.001


class RemoteRollout(Rollout):
    """The engine of `ranks`, which hold one model together and get the same visits.

    The workers offer `rollout_visit`, `rollout_version` and the like (`GeneratingWorker`).
    """

    def __init__(self, group: WorkerGroup, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        self._group = group.with_deadline(min(VISIT_SECONDS, group.call_timeout_seconds))
        self._numbers = itertools.count()
        self._new: dict[int, GenerationRequest] = {}
        self._asked: dict[int, GenerationRequest] = {}  # all that the engine has not answered
        self._waiting: dict[int, asyncio.Future[list[TokenOutput]]] = {}
        self._given_up: list[int] = []
        self._closed_sessions: list[str] = []
        self._exchange: asyncio.Task[None] | None = None
        self._one_call = threading.Lock()  # ranks that share a model get all calls in one order
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollout visits")

    @property
    def policy_version(self) -> int:
        return self._call("rollout_version")

    @property
    def num_restarts(self) -> int:
        return self._call("rollout_restarts")

    def is_alive(self) -> bool:
        return self._call("rollout_is_alive")

    async def generate(self, request: GenerationRequest) -> list[TokenOutput]:
        loop = asyncio.get_running_loop()
        number = self._ask(request)
        answer = self._waiting[number] = loop.create_future()
        if self._exchange is None or self._exchange.done() or self._exchange.get_loop() is not loop:
            self._exchange = loop.create_task(self._exchange_visits())
        try:
            return await answer
        finally:
            self._forget(number)

    def generate_batch(self, requests: Sequence[GenerationRequest]) -> list[list[TokenOutput]]:
        numbers = [self._ask(request) for request in requests]
        found: dict[int, list[TokenOutput]] = {}
        try:
            while len(found) < len(numbers):
                report = self._visit(self._next_visit())
                for number, reason in report.refused.items():
                    if number in numbers:
                        raise ValueError(reason)
                found.update({n: o for n, o in report.finished.items() if n in numbers})
                for number in found:
                    self._asked.pop(number, None)
        finally:
            for number in numbers:
                self._forget(number)
        return [found[number] for number in numbers]

    def abort(self, request_id: str) -> None:
        self._given_up += [
            number for number, asked in self._asked.items() if asked.request_id == request_id
        ]

    def close_session(self, session_id: str) -> None:
        self._closed_sessions.append(session_id)

    def sleep(self) -> None:
        self._call("rollout_sleep")

    def wake_up(self) -> None:
        self._call("rollout_wake_up")

    # ---- visits ----------------------------------------------------------------------------------

    def _ask(self, request: GenerationRequest) -> int:
        number = next(self._numbers)
        self._new[number] = self._asked[number] = request
        return number

    def _forget(self, number: int) -> None:
        """What the engine still works on is given up at the next visit."""
        self._waiting.pop(number, None)
        is_unanswered = self._asked.pop(number, None) is not None
        if is_unanswered and self._new.pop(number, None) is None:
            self._given_up.append(number)

    def _next_visit(self) -> Visit:
        visit = Visit(
            new=self._new,
            given_up=tuple(self._given_up),
            closed_sessions=tuple(self._closed_sessions),
        )
        self._new, self._given_up, self._closed_sessions = {}, [], []
        return visit

    def _visit(self, visit: Visit) -> VisitReport:
        return self._call("rollout_visit", visit)

    async def _exchange_visits(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            visit = self._next_visit()
            try:
                report = await loop.run_in_executor(self._thread, self._visit, visit)
            except BaseException as error:
                self._fail_all(error)
                if not isinstance(error, Exception):
                    raise
                return  # everybody who waited has the error
            self._deliver(report)
            if report.finished:  # those who got answers may ask again before the next visit
                await asyncio.sleep(PAUSE_SECONDS)

    def _deliver(self, report: VisitReport) -> None:
        for number, outputs in report.finished.items():
            self._asked.pop(number, None)
            answer = self._waiting.get(number)
            if answer is not None and not answer.done():
                answer.set_result(outputs)
        for number, reason in report.refused.items():
            self._asked.pop(number, None)
            answer = self._waiting.get(number)
            if answer is not None and not answer.done():
                answer.set_exception(ValueError(reason))
        for number in (*report.finished, *report.refused):
            self._waiting.pop(number, None)

    def _fail_all(self, error: BaseException) -> None:
        waiting, self._waiting = self._waiting, {}
        for answer in waiting.values():
            if not answer.done() and isinstance(error, Exception):
                answer.set_exception(error)
            else:
                answer.cancel()

    def _call(self, method: str, *args: Any) -> Any:
        with self._one_call:
            try:
                return self._group.execute_ranks(self.ranks, method, *args)[0]
            except WorkerError as error:
                if isinstance(error.__cause__, EngineLostError):
                    raise EngineLostError(str(error.__cause__)) from error
                raise


def remote_rollouts(
    group: WorkerGroup, ranks_per_engine: int, *, first_rank_leads: bool = False
) -> list[RemoteRollout]:
    """One per engine: consecutive ranks hold one model together.

    All of them are called, or only the first where that one leads the engine.
    """
    called = 1 if first_rank_leads else ranks_per_engine
    starts = range(0, group.world_size - ranks_per_engine + 1, ranks_per_engine)
    return [RemoteRollout(group, range(start, start + called)) for start in starts]

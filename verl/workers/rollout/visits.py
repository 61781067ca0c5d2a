"""An engine as another process uses it: in visits.

    driver (`remote`)                              rank (here)
      visit: new requests, those given up  ---->     submit, abort, go on for a moment
      report: what has ended by then       <----
      visit: ...                           ---->

A rank answers one call at a time, so requests that come while it generates join at its next visit;
that is why a visit is short. How an engine goes on depends on its kind: the built-in one is stepped
here, one in a process of its own works by itself, and `hf` knows no steps.
"""

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field

from verl.workers.rollout.base import GenerationRequest, Rollout, StreamingRollout, TokenOutput
from verl.workers.rollout.native.engine import NativeEngine, outputs_of
from verl.workers.rollout.native.sequence import Group

STEPS_PER_VISIT = 4
POLL_SECONDS = 0.02
"""Longest that a new request waits for the end of a visit that has nothing to report."""

Answer = list[TokenOutput] | BaseException


@dataclass(frozen=True, kw_only=True)
class Visit:
    """Requests go by numbers that the driver gives them."""

    new: Mapping[int, GenerationRequest] = field(default_factory=dict)
    given_up: tuple[int, ...] = ()
    closed_sessions: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class VisitReport:
    """What has ended since the last visit."""

    finished: Mapping[int, list[TokenOutput]] = field(default_factory=dict)
    refused: Mapping[int, str] = field(default_factory=dict)
    """Requests that cannot run, with the reason."""


class Visits(ABC):
    """Keeps the requests of an engine from one visit to the next."""

    @abstractmethod
    def visit(self, visit: Visit) -> VisitReport:
        """If the engine fails, it has dropped all requests, and so does this."""


class SteppedVisits(Visits):
    """The length of a visit is a number of steps, never a time: ranks that share a model get the
    same visits and must make the same steps."""

    def __init__(self, engine: NativeEngine) -> None:
        self.engine = engine
        self._under_way: dict[int, list[Group]] = {}

    def visit(self, visit: Visit) -> VisitReport:
        for session in visit.closed_sessions:
            self.engine.close_session(session)
        for number in visit.given_up:
            self._give_up(number)
        refused = self._submit(visit.new)
        try:
            for _ in range(STEPS_PER_VISIT):
                if all(map(_is_finished, self._under_way.values())):
                    break
                self.engine.step()
        except BaseException:
            self._under_way.clear()
            raise
        return VisitReport(finished=self._take_finished(), refused=refused)

    def _give_up(self, number: int) -> None:
        """It ends with what it has; nothing to do if it has been reported already."""
        for group in self._under_way.get(number, []):
            self.engine.abort(group.request.request_id)

    def _submit(self, requests: Mapping[int, GenerationRequest]) -> dict[int, str]:
        refused: dict[int, str] = {}
        for number, request in requests.items():
            try:
                self._under_way[number] = self.engine.submit(request)
            except ValueError as fault:
                refused[number] = str(fault)
        return refused

    def _take_finished(self) -> dict[int, list[TokenOutput]]:
        ended = [number for number, groups in self._under_way.items() if _is_finished(groups)]
        return {number: outputs_of(self._under_way.pop(number)) for number in ended}


def _is_finished(groups: list[Group]) -> bool:
    return all(group.is_finished for group in groups)


class PolledVisits(Visits):
    """Of an engine that works by itself: a visit hands requests over and takes what has ended.

    An event loop on a thread waits for the answers between visits.
    """

    def __init__(self, engine: Rollout) -> None:
        self.engine = engine
        self._under_way: dict[int, tuple[str, Future[list[TokenOutput]]]] = {}
        self._loop = asyncio.new_event_loop()
        loop = threading.Thread(target=self._loop.run_forever, name="engine answers", daemon=True)
        loop.start()

    def visit(self, visit: Visit) -> VisitReport:
        for session in visit.closed_sessions:
            self.engine.close_session(session)
        for number, request in visit.new.items():
            answer = asyncio.run_coroutine_threadsafe(self.engine.generate(request), self._loop)
            self._under_way[number] = request.request_id, answer
        for number in visit.given_up:
            if number in self._under_way:
                self.engine.abort(self._under_way[number][0])
        waiting = [answer for _, answer in self._under_way.values()]
        wait(waiting, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
        return self._report_ended()

    def _report_ended(self) -> VisitReport:
        """A failure is raised once there is nothing else to report."""
        answers: dict[int, Answer] = {
            number: answer.exception(timeout=0) or answer.result(timeout=0)
            for number, (_, answer) in self._under_way.items()
            if answer.done()
        }
        answered = {number: a for number, a in answers.items() if not is_failure(a)}
        if answers and not answered:
            self._under_way.clear()
        for number in answered:
            del self._under_way[number]
        return report_of(answered or answers)


class WholeVisits(Visits):
    """Of an engine without steps: a visit lasts until all its requests are answered."""

    def __init__(self, engine: Rollout) -> None:
        self.engine = engine

    def visit(self, visit: Visit) -> VisitReport:
        for session in visit.closed_sessions:
            self.engine.close_session(session)
        answers = asyncio.run(self._ask(visit.new.values()))
        return report_of(dict(zip(visit.new, answers, strict=True)))

    async def _ask(self, requests: Iterable[GenerationRequest]) -> list[Answer]:
        asked = (self.engine.generate(request) for request in requests)
        return await asyncio.gather(*asked, return_exceptions=True)


def is_failure(answer: Answer) -> bool:
    """Whether it is about the engine; what a request cannot have is a ValueError."""
    return isinstance(answer, BaseException) and not isinstance(answer, ValueError)


def report_of(answers: Mapping[int, Answer]) -> VisitReport:
    """Outputs and refusals by the requests' numbers; raises the first failure."""
    finished: dict[int, list[TokenOutput]] = {}
    refused: dict[int, str] = {}
    for number, answer in answers.items():
        if isinstance(answer, ValueError):
            refused[number] = str(answer)
        elif isinstance(answer, BaseException):
            raise answer
        else:
            finished[number] = answer
    return VisitReport(finished=finished, refused=refused)


def visits_of(engine: Rollout) -> Visits:
    """How the engine is visited."""
    if isinstance(engine, NativeEngine):
        return SteppedVisits(engine)
    return PolledVisits(engine) if isinstance(engine, StreamingRollout) else WholeVisits(engine)

"""Polling interface of an engine on a rank, for a driver in another process.

    driver (`remote`)                                rank (here)
      poll: new requests, cancelled ones   ---->      submit, abort, step briefly
      report: samples that have ended      <----
      poll: ...                            ---->

A rank executes one call at a time, so requests that come during a poll join at the next one; that
is why a poll is short. An engine steps by itself, on a thread or in a process of its own, and a
poll only waits for it. Ranks that hold one model together are different: they must make the same
steps, so a poll runs a fixed number of them, independent of time.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

from verl.workers.rollout.base import GenerationRequest, Rollout, TokenOutput
from verl.workers.rollout.native.core import EngineCore
from verl.workers.rollout.native.engine import NativeEngine
from verl.workers.rollout.native.sequence import RunningRequest

STEPS_PER_POLL = 4
POLL_SECONDS = 0.02
"""Longest that a poll with nothing to report waits, and a new request for the next poll."""


@dataclass(frozen=True, kw_only=True)
class Poll:
    """One poll: changes since the last one; requests are numbered by the driver."""

    new: Mapping[int, GenerationRequest] = field(default_factory=dict)
    aborted: tuple[int, ...] = ()
    """Requests to end with the tokens they have."""

    cancelled: tuple[int, ...] = ()
    """Requests without a caller; their results are discarded."""

    closed_sessions: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PollReport:
    """What has ended since the last poll."""

    ended: Mapping[int, Mapping[int, TokenOutput]] = field(default_factory=dict)
    """Request -> sample -> output; each sample is reported once."""

    refused: Mapping[int, str] = field(default_factory=dict)
    """Requests that cannot run, with the reason."""

    cache_usage: float | None = field(default=None, compare=False)
    """As `Rollout.cache_usage`, after the poll."""


class Poller(ABC):
    """Keeps the requests of an engine from one poll to the next."""

    @abstractmethod
    def poll(self, poll: Poll) -> PollReport:
        """If the engine fails, it has dropped all requests, and so does this."""


class SteppedPoller(Poller):
    """The length of a poll is a number of steps, never a time: ranks that share a model get the
    same polls and must make the same steps."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self._in_flight: dict[int, RunningRequest] = {}

    def poll(self, poll: Poll) -> PollReport:
        for session in poll.closed_sessions:
            self.core.close_session(session)
        refused: dict[int, str] = {}
        for number, request in poll.new.items():
            try:
                self._in_flight[number] = self.core.add(request)
            except ValueError as refusal:
                refused[number] = str(refusal)
        for number in (*poll.aborted, *poll.cancelled):  # also requests that have just come
            if number in self._in_flight:
                self.core.abort_groups(self._in_flight[number].groups)
        try:
            for _ in range(STEPS_PER_POLL):
                if not self.core.has_unfinished:
                    break
                self.core.step()
        except BaseException:
            self._in_flight.clear()
            self.core.take_ended()
            raise
        return PollReport(
            ended=self._take_ended(), refused=refused, cache_usage=self.core.cache_usage
        )

    def _take_ended(self) -> dict[int, dict[int, TokenOutput]]:
        number_of = {running: number for number, running in self._in_flight.items()}
        ended: dict[int, dict[int, TokenOutput]] = {}
        for sample in self.core.take_ended():
            running = sample.group.owner
            number = number_of[running]
            ended.setdefault(number, {})[sample.index] = sample.output
            if running.is_finished:
                self._in_flight.pop(number, None)
        return ended


class WaitingPoller(Poller):
    """For an engine that steps by itself: a poll submits requests and waits for something to end.

    A failure is raised once all that ended before it has been reported.
    """

    def __init__(self, engine: Rollout) -> None:
        self.engine = engine
        self._in_flight: dict[int, tuple[str, Future[list[TokenOutput]]]] = {}
        self._has_ended = threading.Condition()  # guards all but the engine
        self._ended: dict[int, dict[int, TokenOutput]] = {}
        self._refused: dict[int, str] = {}
        self._failure: BaseException | None = None

    def poll(self, poll: Poll) -> PollReport:
        for session in poll.closed_sessions:
            self.engine.close_session(session)
        self._cancel(poll.cancelled)
        with self.engine.together():
            for number, request in poll.new.items():
                self._submit(number, request)
        for number in poll.aborted:  # also requests that have just come
            with self._has_ended:
                name = self._in_flight[number][0] if number in self._in_flight else None
            if name is not None:
                self.engine.abort(name)
        with self._has_ended:
            self._has_ended.wait_for(
                lambda: self._ended or self._refused or self._failure, timeout=POLL_SECONDS
            )
            report = PollReport(
                ended=self._ended, refused=self._refused, cache_usage=self.engine.cache_usage
            )
            if self._failure is not None and report == PollReport():
                failure, self._failure = self._failure, None
                self._cancel(list(self._in_flight))
                raise failure
            self._ended, self._refused = {}, {}
            return report

    def _cancel(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            with self._has_ended:
                _, future = self._in_flight.pop(number, ("", None))
            if future is not None:
                future.cancel()

    def _submit(self, number: int, request: GenerationRequest) -> None:
        def note_end(sample: int, output: TokenOutput) -> None:
            with self._has_ended:
                self._ended.setdefault(number, {})[sample] = output
                self._has_ended.notify_all()

        def note_result(future: Future[list[TokenOutput]]) -> None:
            with self._has_ended:
                if self._in_flight.pop(number, None) is None:  # nobody waits for it
                    return
                error = future.exception()
                if isinstance(error, ValueError):
                    self._refused[number] = str(error)
                elif error is not None:
                    self._failure = error
                self._has_ended.notify_all()

        future = self.engine.submit(request, note_end)
        with self._has_ended:
            self._in_flight[number] = request.request_id, future
        future.add_done_callback(note_result)


def poller_of(engine: Rollout) -> Poller:
    """How the engine is polled."""
    if isinstance(engine, NativeEngine) and engine.is_sharded:
        return SteppedPoller(engine.core)
    return WaitingPoller(engine)

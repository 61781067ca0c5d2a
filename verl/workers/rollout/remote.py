"""A rollout engine in another process, seen from the driver as if it were here.

    submit(a) --+                             submit(c) --+
    submit(b) --+--> poll on a thread ------> (a, b, c) --+--> poll on a thread --> ...
                     (event loops are free: loops run, graders grade)

The driver keeps the requests and their futures; the engine's process keeps the sequences
(`polling`). One poll at a time, as long as a request is unfinished; a poll that fails is the error
of all of them. An engine that its rank has lost is `EngineLostError` here too: the request may be
submitted again after a restart.
"""

import itertools
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any

from verl.single_controller.base.failures import WorkerDied, WorkerError
from verl.single_controller.base.worker_group import WorkerGroup
from verl.workers.rollout.base import (
    EngineLostError,
    GenerationRequest,
    OnEnd,
    Rollout,
    TokenOutput,
)
from verl.workers.rollout.polling import Poll, PollReport
from verl.workers.rollout.stepping import EngineThread, Submission
from verl.workers.weight_sync.bucket import WeightsNotReadyError

POLL_TIMEOUT_SECONDS = 900.0
"""A poll is a few steps; only the prefill of very long prompts on a CPU takes minutes."""

PAUSE_SECONDS = 0.001
"""Between polls that brought results, so that their callers can submit the next requests."""


class RemoteRollout(Rollout):
    """The engine of `ranks`, which hold one model together and get the same polls.

    The workers offer `rollout_poll`, `rollout_version` and the like (`GeneratingWorker`).
    """

    def __init__(
        self, group: WorkerGroup, ranks: Sequence[int], *, is_expendable: bool = False
    ) -> None:
        """With `is_expendable` the run goes on without these ranks if their processes end."""
        self.group, self.ranks = group, tuple(ranks)
        self._is_expendable = is_expendable
        self._group = group.with_deadline(min(POLL_TIMEOUT_SECONDS, group.call_timeout_seconds))
        self._numbers = itertools.count()
        self._in_flight: dict[int, Submission] = {}
        self._new: dict[int, GenerationRequest] = {}
        self._aborted: list[int] = []
        self._cancelled: list[int] = []
        self._closed_sessions: list[str] = []
        self._cache_usage: float | None = None
        self._one_call = threading.Lock()  # ranks that share a model get all calls in one order
        self._thread = EngineThread(self, RemoteRollout._poll, name="rollout polls")

    @property
    def policy_version(self) -> int:
        return self._call("rollout_version")

    @property
    def num_restarts(self) -> int:
        return self._call("rollout_restarts")

    @property
    def cache_usage(self) -> float | None:
        return self._cache_usage

    def is_alive(self) -> bool:
        return self._call("rollout_is_alive")

    def submit(
        self, request: GenerationRequest, on_end: OnEnd | None = None
    ) -> Future[list[TokenOutput]]:
        return self._thread.submit(request, on_end, RemoteRollout._add, RemoteRollout._cancel)

    def together(self) -> AbstractContextManager[None]:
        return self._thread.together()

    def abort(self, request_id: str) -> None:
        self._thread.post(RemoteRollout._abort, request_id)

    def close_session(self, session_id: str) -> None:
        self._thread.post(RemoteRollout._close_session, session_id)

    def sleep(self) -> None:
        with self._thread.paused():
            self._poll()  # the engine may not know yet what has been cancelled
            self._call("rollout_sleep")

    def wake_up(self) -> None:
        with self._thread.paused():
            self._call("rollout_wake_up")

    def close(self) -> None:
        """End the polls; the engine is the rank's."""
        self._thread.close()
        submissions, self._in_flight = self._in_flight, {}
        for submission in submissions.values():
            submission.fail(RuntimeError("the engine was closed"))

    # ---- between polls, posted by other threads --------------------------------------------------

    def _add(self, submission: Submission) -> None:
        if not submission.future.cancelled():
            number = next(self._numbers)
            self._in_flight[number] = submission
            self._new[number] = submission.request

    def _cancel(self, future: Future[list[TokenOutput]]) -> None:
        for number, submission in list(self._in_flight.items()):
            if submission.future is future:
                del self._in_flight[number]
                if self._new.pop(number, None) is None:
                    self._cancelled.append(number)

    def _abort(self, request_id: str) -> None:
        self._aborted += [
            number
            for number, submission in self._in_flight.items()
            if submission.request.request_id == request_id
        ]

    def _close_session(self, session_id: str) -> None:
        self._closed_sessions.append(session_id)

    # ---- polls -----------------------------------------------------------------------------------

    def _poll(self) -> bool:
        """On the thread. True if another poll is to follow."""
        poll = Poll(
            new=self._new,
            aborted=tuple(self._aborted),
            cancelled=tuple(self._cancelled),
            closed_sessions=tuple(self._closed_sessions),
        )
        if not self._in_flight and poll == Poll():
            return False
        self._new, self._aborted, self._cancelled, self._closed_sessions = {}, [], [], []
        try:
            report: PollReport = self._call("rollout_poll", poll)
        except Exception as error:
            submissions, self._in_flight = self._in_flight, {}
            for submission in submissions.values():
                submission.fail(error)
        else:
            if self._deliver(report):
                time.sleep(PAUSE_SECONDS)
        return bool(self._in_flight)

    def _deliver(self, report: PollReport) -> bool:
        """Whether any future was resolved."""
        self._cache_usage = report.cache_usage
        complete = []
        for number, samples in report.ended.items():
            submission = self._in_flight.get(number)
            if submission is not None:
                for sample, output in samples.items():
                    submission.end(sample, output)
                if submission.is_complete:
                    complete.append(self._in_flight.pop(number))
        for submission in complete:
            submission.resolve()
        for number, reason in report.refused.items():
            submission = self._in_flight.pop(number, None)
            if submission is not None:
                submission.fail(ValueError(reason))
        return bool(complete or report.refused)

    def _call(self, method: str, *args: Any) -> Any:
        with self._one_call:
            try:
                return self._group.execute_ranks(self.ranks, method, *args)[0]
            except WorkerError as error:
                for kind in (EngineLostError, WeightsNotReadyError):
                    if isinstance(error.__cause__, kind):
                        raise kind(str(error.__cause__)) from error
                if self._is_expendable and isinstance(error, WorkerDied):
                    raise EngineLostError(str(error)) from error
                raise


def remote_rollouts(
    group: WorkerGroup,
    ranks_per_engine: int,
    *,
    first_rank_leads: bool = False,
    is_expendable: bool = False,
) -> list[RemoteRollout]:
    """One per engine: consecutive ranks hold one model together.

    All of them are called, or only the first where that one leads the engine.
    """
    called = 1 if first_rank_leads else ranks_per_engine
    starts = range(0, group.world_size - ranks_per_engine + 1, ranks_per_engine)
    return [
        RemoteRollout(group, range(start, start + called), is_expendable=is_expendable)
        for start in starts
    ]

"""`GradingService`: the only schedule of grading, and its only fault boundary.

    any thread                         lanes: worker threads, or tasks on the grading event loop
      submit(trajectories)  -------->    take the next call, make it, set `trajectory.grade`
      ...                                ...
      wait(groups)          <--------    the last grade is in; groups with an infra error once more

                                       watchdog thread
                                         abandons a lane whose call is past its deadline, or an
                                         event loop that a grader blocks, and starts another

Trajectories are submitted as they end, while others are still generated. Those of one hand-over are
prepared together. Graders of a wider scope are called by `wait`, when their scope is complete. The
event loop outlives the services of a process, because clients of async reward functions are bound
to it; it is never the loop that generates, whose steps would count as time of the graders.

A group in which grading fails is graded again as a whole, once. If that fails too it is dropped: a
prompt is compared with all of its responses or not at all. A response on which the grader abstains
leaves its group, which needs at least two others; so does one that an `InfraFault` ended before it
could be graded. Of a session with several rows the last one is graded. An infra error never becomes
a reward. When many calls fail, and with them some that succeeded before, `wait` pauses instead of
dropping groups.
"""

import asyncio
import concurrent.futures
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

from verl.protocol.trajectory import Grade, Group, InfraError, Score, Trajectory
from verl.utils.breaker import Breaker
from verl.utils.processes import forks_end_here
from verl.workers.reward_manager.grader import (
    Grader,
    RewardError,
    checked,
    contained,
    drop_reason,
    has_failed,
    infra_error_of,
    traced,
)

logger = logging.getLogger(__name__)

MAX_WATCH_SECONDS = 0.25
MAX_WAIT_SECONDS = 86400.0  # calls have deadlines; this one is for a queue behind a rate limit

IDLE_SECONDS = 600.0  # a worker thread without calls ends after that
NUM_PROBED = 16  # graded trajectories, kept to find out whether grading works at all
MAX_OUTAGES = 3  # in one wait; after that its groups are dropped

Call = list[Trajectory]


class GradingService:
    """Has `grader` grade trajectories; whatever it does, each of them gets a grade."""

    MAX_TIMEOUTS_IN_A_ROW = 3
    """After that the rest of a wait is not tried: what the grader waits for is not there."""

    def __init__(
        self, grader: Grader, *, max_timeouts_in_a_row: float = MAX_TIMEOUTS_IN_A_ROW
    ) -> None:
        self.grader = grader
        self._max_timeouts_in_a_row = max_timeouts_in_a_row
        self._lock = threading.RLock()
        self._has_work = threading.Condition(self._lock)
        self._arrived: list[Call] = []
        self._queue: deque[Call] = deque()
        self._in_flight: dict[int, Trajectory] = {}
        self._waits: dict[int, _Wait] = {}
        self._lanes: set[_Lane] = set()
        self._event_loop: GradingLoop | None = None
        self._watchdog: threading.Thread | None = None
        self._timeouts_in_a_row = 0
        self._last_error: BaseException | None = None
        self._is_closed = False
        self._breaker = Breaker(grader.name)
        self._may_probe = grader.is_retryable and grader.scope == "trajectory"
        self._known_good: deque[Trajectory] = deque(maxlen=NUM_PROBED)

    def submit(self, trajectories: Sequence[Trajectory]) -> None:
        """Start to grade trajectories that have ended, unless they have a grade already."""
        if self.grader.scope == "trajectory":
            with self._lock:
                self._enqueue([[t] for t in trajectories if self._is_new(t)])

    def settle(self, groups: Sequence[Group]) -> "concurrent.futures.Future[int]":
        """Resolves when all groups have their final grades, to the number of calls that failed.

        `group.fault` is then the reason for each group that is dropped.
        """
        wait = _Wait(groups)
        self._begin_pass(wait, groups)
        return wait.future

    def grade_once(
        self, trajectories: Sequence[Trajectory], *, is_reported: bool = True
    ) -> "concurrent.futures.Future[int]":
        """`settle` for trajectories whose groups do not matter: nothing is graded again.

        Without `is_reported` errors are left to whoever settles or reports them later.
        """
        group = Group(index=0, uid="", drawn_at=0, trajectories=list(trajectories))
        wait = _Wait([group], may_retry=False, is_reported=is_reported)
        self._begin_pass(wait, [group])
        return wait.future

    def wait(self, groups: Sequence[Group]) -> int:
        """`settle`, waited for; during an outage until that is over, or `Outage` is raised."""
        num_errors = self.settle(groups).result(timeout=MAX_WAIT_SECONDS)
        for _ in range(MAX_OUTAGES):
            failed = [group for group in groups if any(map(has_failed, group.last_rows))]
            may_be_out = failed and self._known_good and self._breaker.is_open
            if not (may_be_out and self._breaker.pause(self._failing_share)):
                break
            for trajectory in (t for group in failed for t in group.last_rows):
                trajectory.grade = None
            num_errors += self.settle(failed).result(timeout=MAX_WAIT_SECONDS)
        return num_errors

    def _failing_share(self) -> float:
        """Of some trajectories that had a score, graded once more: how many have none now."""
        again = [replace(trajectory, grade=None) for trajectory in self._known_good]
        num_errors = self.grade_once(again, is_reported=False).result(timeout=MAX_WAIT_SECONDS)
        return num_errors / len(again)

    def cancel(self) -> None:
        """Forget all that has no grade yet; who waits for it gets a `CancelledError`."""
        with self._lock:
            waits = set(self._waits.values())
            self._arrived = []
            self._queue.clear()
            self._in_flight.clear()
            self._waits.clear()
            for lane in [lane for lane in self._lanes if not lane.is_idle]:
                self._abandon(lane)
            for wait in waits:
                wait.future.cancel()

    def close(self) -> None:
        """Cancel, and end the worker threads."""
        self.cancel()
        with self._lock:
            self._is_closed = True
            self._has_work.notify_all()

    # ---- passes over groups ----------------------------------------------------------------------

    def _begin_pass(self, wait: "_Wait", groups: Sequence[Group]) -> None:
        trajectories = [t for group in groups for t in group.last_rows]
        with self._lock:
            ungraded = [t for t in trajectories if t.grade is None]
            wait.trajectories, wait.num_pending = trajectories, len(ungraded)
            self._waits |= {id(t): wait for t in ungraded}
            if self.grader.scope == "trajectory":
                calls = [[t] for t in ungraded if self._is_new(t)]
            elif self.grader.scope == "group":
                calls = [[t for t in group.last_rows if t.grade is None] for group in groups]
            else:
                calls = [ungraded]
            calls = [call for call in calls if call]
            is_inline = math.isinf(self.grader.timeout_seconds)
            if not is_inline:
                self._enqueue(calls)
        if not ungraded:
            self._end_pass(wait)
        elif is_inline:  # without a deadline there is no reason to leave the caller's thread
            for call in calls:
                if self._prepare([call]):
                    self._record(call, self._grades(call))

    def _end_pass(self, wait: "_Wait") -> None:
        errors = [t.grade for t in wait.trajectories if isinstance(t.grade, InfraError)]
        wait.num_errors += len(errors)
        again = [group for group in wait.groups if any(map(self._may_retry, group.last_rows))]
        again = again if wait.may_retry else []
        cause: BaseException | None = None
        with self._lock:
            if not self._in_flight:
                self._timeouts_in_a_row = 0
            if wait.is_reported:
                cause, self._last_error = self._last_error, None
        if errors and wait.is_reported:
            what_now = "trying again" if again else "not trying again"
            text = "grading failed %d times, e.g. %s; %s"
            logger.warning(text, len(errors), errors[0].reason, what_now, exc_info=cause)
        if again:
            wait.may_retry = False
            for group in again:
                for trajectory in group.last_rows:
                    trajectory.grade = None
            self._begin_pass(wait, again)
            return
        for group in wait.groups:
            group.fault = drop_reason([t.grade for t in group.last_rows], group.lost)
        with self._lock:
            if not wait.future.cancelled():
                wait.future.set_result(wait.num_errors)

    def _may_retry(self, trajectory: Trajectory) -> bool:
        grade = trajectory.grade
        return isinstance(grade, InfraError) and not grade.is_final and self.grader.is_retryable

    # ---- calls -----------------------------------------------------------------------------------

    def _is_new(self, trajectory: Trajectory) -> bool:
        return trajectory.grade is None and id(trajectory) not in self._in_flight

    def _enqueue(self, calls: list[Call]) -> None:
        """One hand-over; the lock is held."""
        assert not self._is_closed, "this grading service is closed"
        if not calls:
            return
        self._in_flight |= {id(t): t for call in calls for t in call}
        self._arrived += calls
        self._start_lanes()
        if self._watchdog is None:
            name = "grading-watchdog"
            self._watchdog = threading.Thread(target=self._watch, daemon=True, name=name)
            self._watchdog.start()

    def _start_lanes(self) -> None:
        """Wake or start a lane per call, up to the limit; the lock is held."""
        num_calls = len(self._queue) + bool(self._arrived)
        self._has_work.notify(num_calls)
        num_idle = sum(lane.is_idle for lane in self._lanes)
        num_free = self.grader.max_concurrent - len(self._lanes)
        for _ in range(min(num_free, num_calls - num_idle)):
            lane = _Lane()
            self._lanes.add(lane)
            if self.grader.is_blocking:
                thread = self._run_on_thread
                threading.Thread(target=thread, args=(lane,), daemon=True, name="grading").start()
            else:
                self._event_loop = GradingLoop.current()
                lane.start_on(self._event_loop, self._run_on_loop)

    def _run_on_thread(self, lane: "_Lane") -> None:
        while self._has_calls(lane):
            self._prepare_arrived()
            call = self._take(lane)
            if call is not None:
                self._finish(lane, call, self._grades(call))

    def _has_calls(self, lane: "_Lane") -> bool:
        """Wait for calls; False if the thread is to end."""
        with self._lock:
            lane.is_idle = True
            while not (self._queue or self._arrived or self._is_closed or lane.is_abandoned):
                if not self._has_work.wait(IDLE_SECONDS):
                    self._lanes.discard(lane)
                    return False
            lane.is_idle = False
            return not (self._is_closed or lane.is_abandoned)

    async def _run_on_loop(self, lane: "_Lane") -> None:
        while True:
            if self._arrived:  # decoding would keep the event loop from other calls
                await asyncio.get_running_loop().run_in_executor(None, self._prepare_arrived)
            call = self._take(lane)
            if call is None:
                return
            try:
                with traced(call) as told:
                    grades = self._checked(call, told(await contained(self._begun(call))))
            except (asyncio.CancelledError, Exception) as error:
                if lane.is_abandoned and isinstance(error, asyncio.CancelledError):
                    raise
                grades = self._failed(call, error)
            self._finish(lane, call, grades)

    def _prepare_arrived(self) -> None:
        """Take in what has been handed over since the last time."""
        with self._lock:
            arrived, self._arrived = self._arrived, []
        if arrived and self._prepare(arrived):
            with self._lock:
                self._queue += [call for call in arrived if id(call[0]) in self._in_flight]
                self._start_lanes()

    def _take(self, lane: "_Lane") -> Call | None:
        """The next call, whose clock starts now."""
        skipped: list[Call] = []
        with self._lock:
            if self._timeouts_in_a_row >= self._max_timeouts_in_a_row:
                skipped = list(self._queue)
                self._queue.clear()
            if self._queue and not lane.is_abandoned:
                seconds = math.inf if self.grader.has_own_deadline else self.grader.timeout_seconds
                lane.call, lane.deadline = self._queue.popleft(), time.monotonic() + seconds
            elif not self.grader.is_blocking:
                self._lanes.discard(lane)  # tasks are cheap; a thread waits for more
                self._start_lanes()  # for what was handed over just now
            call = lane.call
        reason = f"not tried after {self._max_timeouts_in_a_row} time-outs in a row"
        for late in skipped:
            self._record(late, [InfraError(reason)] * len(late), was_tried=False)
        return call

    def _finish(self, lane: "_Lane", call: Call, grades: list[Grade]) -> None:
        with self._lock:
            lane.call, lane.deadline = None, math.inf
            if lane.is_abandoned:  # too late: the call has its grade
                return
        self._record(call, grades)

    def _record(self, call: Call, grades: list[Grade], *, was_tried: bool = True) -> None:
        """Set the grades, and end the passes that waited for nothing else."""
        complete: list[_Wait] = []
        with self._lock:
            is_timeout = any(isinstance(g, InfraError) and g.is_timeout for g in grades)
            if was_tried:
                self._timeouts_in_a_row = self._timeouts_in_a_row + 1 if is_timeout else 0
            for trajectory, grade in zip(call, grades, strict=True):
                trajectory.grade = grade
                self._breaker.note(grade.reason if isinstance(grade, InfraError) else None)
                if isinstance(grade, Score) and self._may_probe:
                    self._known_good.append(trajectory)
                self._in_flight.pop(id(trajectory), None)
                wait = self._waits.pop(id(trajectory), None)
                if wait is not None:
                    wait.num_pending -= 1
                    complete += [wait] if wait.num_pending == 0 else []
        for wait in complete:
            self._end_pass(wait)

    # ---- the boundary ----------------------------------------------------------------------------

    def _prepare(self, calls: list[Call]) -> bool:
        """Whether the grader could prepare a hand-over; if not, its trajectories have failed."""
        try:
            self.grader.prepare([trajectory for call in calls for trajectory in call])
        except BaseException as error:
            for call in calls:
                self._record(call, self._failed(call, error))
            return False
        return True

    def _grades(self, call: Call) -> list[Grade]:
        """Make a call on this thread; whatever the grader does, grades come back."""
        try:
            with forks_end_here(), traced(call) as told, closing(self._begun(call)) as work:
                try:
                    work.send(None)
                except StopIteration as end:
                    return self._checked(call, told(end.value))
                raise RuntimeError("a blocking grader waited for an event loop")
        except BaseException as error:  # SystemExit ends a call, not the run
            if isinstance(error, KeyboardInterrupt):  # Ctrl-C, for only the main thread gets it
                raise
            return self._failed(call, error)

    def _begun(self, call: Call) -> Coroutine[Any, Any, Grade | list[Grade]]:
        is_one = self.grader.scope == "trajectory"
        return self.grader.grade(call[0]) if is_one else self.grader.grade_many(call)

    def _failed(self, call: Call, error: BaseException) -> list[Grade]:
        with self._lock:
            self._last_error = error
        return [infra_error_of(error, self.grader.name, self.grader.timeout_seconds)] * len(call)

    def _checked(self, call: Call, grades: Grade | list[Grade]) -> list[Grade]:
        grades = grades if isinstance(grades, list) else [grades]
        if len(grades) != len(call):
            name, num = self.grader.name, len(grades)
            raise RewardError(f"{name} gave {num} grades for {len(call)} responses")
        return [checked(grade) for grade in grades]

    # ---- the watchdog ----------------------------------------------------------------------------

    def _watch(self) -> None:
        """Runs while there are calls; no grader can keep it from its work."""
        pause = min(MAX_WATCH_SECONDS, self.grader.timeout_seconds / 8)
        while True:
            time.sleep(pause)
            with self._lock:
                if self._is_closed or not self._in_flight:
                    self._watchdog = None
                    return
                overdue = self._overdue_calls()
            text = f"{self.grader.name} took longer than {self.grader.timeout_seconds} s"
            for call in overdue:
                self._record(call, [InfraError(text, is_timeout=True)] * len(call))
            with self._lock:
                self._start_lanes()

    def _overdue_calls(self) -> list[Call]:
        """The calls of lanes that are abandoned now; the lock is held."""
        late = [lane for lane in self._lanes if lane.deadline < time.monotonic()]
        loop = self._event_loop
        if loop is not None and loop.is_blocked(self.grader.timeout_seconds):
            loop.abandon()
            self._event_loop = None
            late = list(self._lanes)
        calls = [lane.call for lane in late if lane.call is not None]
        for lane in late:
            self._abandon(lane)
        return calls

    def _abandon(self, lane: "_Lane") -> None:
        """The lock is held. A thread cannot be killed: it ends when its call does."""
        lane.is_abandoned = True
        self._lanes.discard(lane)
        self._has_work.notify_all()
        lane.cancel()


@dataclass(eq=False)
class _Wait:
    """Groups that somebody waits for; `trajectories` are those of the current pass."""

    groups: Sequence[Group]
    trajectories: list[Trajectory] = field(default_factory=list)
    num_pending: int = 0
    num_errors: int = 0
    may_retry: bool = True
    is_reported: bool = True
    future: "concurrent.futures.Future[int]" = field(default_factory=concurrent.futures.Future)


class _Lane:
    """Makes one call at a time, on a thread or as a task of the event loop."""

    def __init__(self) -> None:
        self.call: Call | None = None
        self.deadline = math.inf
        self.is_idle = False
        self.is_abandoned = False
        self._loop: GradingLoop | None = None
        self._task: asyncio.Task[None] | None = None

    def start_on(
        self, loop: "GradingLoop", run: Callable[["_Lane"], Coroutine[Any, Any, None]]
    ) -> None:
        def start() -> None:
            self._task = asyncio.get_running_loop().create_task(run(self))

        self._loop = loop
        loop.call(start)

    def cancel(self) -> None:
        if self._loop is not None:
            self._loop.call(lambda: self._task and self._task.cancel())


class GradingLoop:
    """An event loop on a daemon thread, shared by all services of this process."""

    _current: "GradingLoop | None" = None
    _choosing = threading.Lock()

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._probed_at: float | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="grading-loop")
        self._thread.start()

    @classmethod
    def current(cls) -> "GradingLoop":
        """Started on first use; in a forked process the thread is gone, so there anew."""
        with cls._choosing:
            if cls._current is None or not cls._current._thread.is_alive():
                cls._current = cls()
            return cls._current

    def call(self, function: Callable[[], Any]) -> None:
        """Have it called on the loop; does not wait."""
        self._loop.call_soon_threadsafe(function)

    def is_blocked(self, seconds: float) -> bool:
        """Whether a probe has gone unanswered for that long; sends the next one if not."""
        probed_at = self._probed_at
        if probed_at is None:
            probed_at = self._probed_at = time.monotonic()
            self.call(self._answer)
        return time.monotonic() - probed_at > seconds

    def abandon(self) -> None:
        """It is blocked for good: whoever asks next gets another one."""
        with self._choosing:
            if GradingLoop._current is self:
                GradingLoop._current = None

    def _answer(self) -> None:
        self._probed_at = None

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

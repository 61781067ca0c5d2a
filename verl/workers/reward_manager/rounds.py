"""Grading many responses at the same time, on a thread of its own.

    caller's thread                        grading thread (one per process)
      round.add(row, response) ---------->   event loop: judge, `max_concurrent` at a time
      round.add(row, response) ---------->   ...
      round.grades() waits while             each grade is noted as it comes
        the event loop answers

Responses may be added while others are still generated; the grades stand in the order of the rows.
The event loop outlives the round, for clients that an async reward function keeps are bound to it,
and it is not the one that generates, whose steps would count as time of the functions.

Every call of a reward function has its own deadline. A function that blocks the event loop itself
is given up by `grades`, and later rounds get another loop. After some time-outs in a row the rest
is not tried, for whatever the function waits for is not there.
"""

import asyncio
import concurrent.futures
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any

from verl.workers.reward_manager.results import Grade, InfraError

PROBE_SECONDS = 0.5


class GradingRound:
    """`judge` grades one response; it is given what `add` was given."""

    MAX_TIMEOUTS_IN_A_ROW = 3

    def __init__(
        self,
        judge: Callable[[Any], Awaitable[Grade]],
        *,
        timeout_seconds: float,
        max_concurrent: int,
    ) -> None:
        self._judge = judge
        self._timeout_seconds = timeout_seconds
        self._slots = asyncio.Semaphore(max_concurrent)
        self._loop = GradingLoop.current()
        self._rows: list[int] = []
        self._grades: dict[int, Grade] = {}
        self._has_news = threading.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self._timeouts_in_a_row = 0

    def add(self, row: int, response: Any) -> None:
        self.add_all([(row, response)])

    def add_all(self, responses: Iterable[tuple[int, Any]]) -> None:
        """Start to grade these; `row` says where the grade will stand."""
        numbered = list(responses)
        self._rows += [row for row, _ in numbered]
        self._loop.call(lambda: self._start(numbered))

    def grades(self) -> list[Grade]:
        """A grade for everything that was added, by ascending row."""
        while not self._is_finished(PROBE_SECONDS):
            if not self._loop.answers_within(self._timeout_seconds):
                self._loop.abandon()
                break
        missing = InfraError("grading stood still and was given up", is_timeout=True)
        return [self._grades.get(row, missing) for row in sorted(self._rows)]

    def cancel(self) -> None:
        """Forget what is not graded yet."""
        self._loop.call(lambda: [task.cancel() for task in self._tasks])

    def _is_finished(self, timeout: float) -> bool:
        with self._has_news:
            return self._has_news.wait_for(lambda: len(self._grades) >= len(self._rows), timeout)

    def _start(self, numbered: list[tuple[int, Any]]) -> None:
        for row, response in numbered:
            task = asyncio.get_running_loop().create_task(self._grade(row, response))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _grade(self, row: int, response: Any) -> None:
        async with self._slots:
            grade = await self._judged(response)
        with self._has_news:
            self._grades[row] = grade
            self._has_news.notify_all()

    async def _judged(self, response: Any) -> Grade:
        if self._timeouts_in_a_row >= self.MAX_TIMEOUTS_IN_A_ROW:
            return InfraError(f"not tried after {self._timeouts_in_a_row} time-outs in a row")
        try:
            grade = await self._judge(response)
        except Exception as error:
            return InfraError(f"the reward manager raised {type(error).__name__}: {error}")
        is_timeout = isinstance(grade, InfraError) and grade.is_timeout
        self._timeouts_in_a_row = self._timeouts_in_a_row + 1 if is_timeout else 0
        return grade


class GradingLoop:
    """An event loop on a daemon thread, shared by all rounds of this process."""

    _current: "GradingLoop | None" = None
    _choosing = threading.Lock()

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True, name="grading")
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

    def run(self, work: Coroutine[Any, Any, Any], seconds: float) -> Any:
        """What the coroutine returns; `TimeoutError` if the loop has nothing to say by then."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout=seconds)
        except concurrent.futures.TimeoutError:
            self.abandon()
            raise TimeoutError(f"the event loop was blocked for {seconds} s") from None

    def answers_within(self, seconds: float) -> bool:
        answered = threading.Event()
        self.call(answered.set)
        return answered.wait(seconds)

    def abandon(self) -> None:
        """It is blocked for good: whoever asks next gets another one."""
        with self._choosing:
            if GradingLoop._current is self:
                GradingLoop._current = None

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

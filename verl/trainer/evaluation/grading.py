"""The responses of a file, and a grade for each from processes that can be killed.

    this thread                         `GradingService`
      reads tasks, a few ahead   ---->    `PositionalCalls`: processes of this machine, or
      collects grades            <----    `RayCalls`: actors of a Ray cluster with one CPU each

A row has a prompt's responses (a list, or one text), its data source and its answer. What is
missing in one row makes that row unscored, with the reason; a column that is missing altogether is
an error. Tasks are read as they are needed, so the file's size does not matter. Grades arrive in
the order in which they are finished.

The time limit of a response is kept by the process pool where the function runs: a process that
takes too long is killed, one that dies is replaced. What the service waits for is a Ray actor
itself: one that is lost with its machine is started again by Ray and the call repeated; one that
does not answer at all leaves its response without a score.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from verl.config.generation import EvaluationDataConfig
from verl.protocol.trajectory import Grade, Trajectory
from verl.utils.dataset.quarantine import ANSWER_COLUMNS, ground_truth_of
from verl.utils.dataset.tables import BadRow, DataError, Row, open_table
from verl.utils.import_utils import require
from verl.workers.reward_manager.grader import Grader
from verl.workers.reward_manager.prime import positional_pool
from verl.workers.reward_manager.service import MAX_WAIT_SECONDS, GradingService
from verl.workers.reward_manager.workers import MAX_RETRIES

RewardFunction = Callable[..., Any]


@dataclass(frozen=True)
class Task:
    """One response; `row` and `number` (the response within its row) count from 1."""

    row: int
    number: int
    data_source: str
    response: str
    ground_truth: Any


def grade_all(
    tasks: Iterable[Task], grader: Grader, on_grade: Callable[[Task, Grade], None]
) -> None:
    """Grade every task once; `on_grade` is called in this thread with each one and its grade.

    However many time out one after another, the next one is tried: it is another response.
    """
    service = GradingService(grader, max_timeouts_in_a_row=math.inf)
    pending: dict[Future[int], tuple[Task, Trajectory]] = {}

    def collect() -> None:
        done, _ = wait(pending, timeout=MAX_WAIT_SECONDS, return_when=FIRST_COMPLETED)
        for work in done:
            task, trajectory = pending.pop(work)
            assert trajectory.grade is not None
            on_grade(task, trajectory.grade)

    try:
        for task in tasks:
            arguments = (task.data_source, task.response, task.ground_truth)
            trajectory = Trajectory(
                uid=str(task.row), sample=task.number, row={"arguments": arguments}
            )
            pending[service.grade_once([trajectory], is_reported=False)] = task, trajectory
            if len(pending) >= 2 * grader.max_concurrent:
                collect()
        while pending:
            collect()
    finally:
        service.close()


START_SECONDS = 600.0
"""Timeout of the start of an actor on a busy cluster: placement and imports."""


class RayCalls(Grader):
    """Calls `function(*row["arguments"])` in actors, one response at a time each.

    Starts Ray with `ray_init` unless it runs; `num_workers=None` takes one actor per CPU.
    """

    name = "a Ray actor"

    def __init__(
        self,
        function: RewardFunction,
        *,
        num_workers: int | None,
        timeout_seconds: float,
        ray_init: dict[str, Any],
    ) -> None:
        self._ray = require("ray", extra="ray")
        if not self._ray.is_initialized():
            self._ray.init(**ray_init)
        self.max_concurrent = num_workers or int(self._ray.cluster_resources()["CPU"])
        self.timeout_seconds = START_SECONDS + (1 + MAX_RETRIES) * timeout_seconds
        options = {"num_cpus": 1, "max_restarts": -1, "max_task_retries": MAX_RETRIES}
        actor = self._ray.remote(**options)(CallsInActor)
        self._idle = [actor.remote(function, timeout_seconds) for _ in range(self.max_concurrent)]

    async def grade(self, trajectory: Trajectory) -> Grade:
        actor = self._idle.pop()
        try:
            return await actor.grade.remote(trajectory.row["arguments"])
        finally:
            self._idle.append(actor)

    def close(self) -> None:
        for actor in self._idle:
            self._ray.kill(actor)


class CallsInActor:
    """What an actor runs."""

    def __init__(self, function: RewardFunction, timeout_seconds: float) -> None:
        self._pool = positional_pool(function, timeout_seconds)

    def grade(self, arguments: tuple[Any, ...]) -> Grade:
        return self._pool.call({"arguments": arguments})


NO_SOURCE = "unknown"


@dataclass(frozen=True)
class Unscored:
    """A response without a score; `number` is None where a whole row has none."""

    row: int
    number: int | None
    data_source: str
    reason: str


class ResponseFile:
    """Iterating gives a `Task` for each response, and an `Unscored` where that is impossible.

    `needs_answer` says that the reward function cannot do without the right answer, so that a row
    without one is unscored rather than compared with nothing.
    """

    def __init__(self, config: EvaluationDataConfig, *, needs_answer: bool) -> None:
        self._config = config
        self._needs_answer = needs_answer
        self._table = open_table(config.path)
        self.num_rows = len(self._table)
        self._check_columns()

    def __iter__(self) -> Iterator[Task | Unscored]:
        for row_number, row in enumerate(self._rows(), start=1):
            if isinstance(row, BadRow):
                yield Unscored(row_number, None, NO_SOURCE, row.reason)
            else:
                yield from self._tasks(row_number, row)

    def _rows(self) -> Iterator[Row]:
        config = self._config
        keys = (config.response_key, config.data_source_key, config.reward_model_key)
        return self._table.scan({*keys, *ANSWER_COLUMNS})

    def _tasks(self, row_number: int, row: Mapping[str, Any]) -> Iterator[Task | Unscored]:
        config = self._config
        source = str(row.get(config.data_source_key) or NO_SOURCE)
        responses = row.get(config.response_key)
        answer = ground_truth_of({**row, "reward_model": row.get(config.reward_model_key)})
        fault = self._fault(responses, answer)
        if fault is not None:
            yield Unscored(row_number, None, source, fault)
            return
        for number, response in enumerate(as_list(responses), start=1):
            if isinstance(response, str):
                yield Task(row_number, number, source, response, answer)
            else:
                kind = type(response).__name__
                yield Unscored(row_number, number, source, f"the response is {kind}, not text")

    def _fault(self, responses: Any, answer: Any) -> str | None:
        key = self._config.response_key
        if responses is None or len(as_list(responses)) == 0:
            return f"there are no responses in {key!r}"
        if answer is None and self._needs_answer:
            return f"there is no ground_truth in {self._config.reward_model_key!r}"
        return None

    def _check_columns(self) -> None:
        rows = (row for file in self._table.files for row in file)
        first = next((row for row in rows if isinstance(row, dict)), None)
        if first is None:
            raise DataError(f"{self._config.path} (data.path) has no row that can be read")
        for option in ("response_key", "data_source_key"):
            name = self._config[option]
            if name not in first:
                close = get_close_matches(name, first, n=1)
                hint = f"did you mean {close[0]!r}? " if close else ""
                raise DataError(
                    f"{self._config.path} has no column {name!r} (data.{option}); {hint}"
                    f"it has: {', '.join(first)}"
                )


def as_list(responses: Any) -> Sequence[Any]:
    """A row may hold one response by itself."""
    return [responses] if not isinstance(responses, list | tuple) else responses

"""The responses of a file, and a grade for each from processes that can be killed.

    this thread, an event loop          workers
      num_workers coroutines: each        call the reward function; a process that takes too long
      takes the next task and waits       is killed, one that dies is replaced

A row has a prompt's responses (a list, or one text), its data source and its answer. What is
missing in one row makes that row unscored, with the reason; a column that is missing altogether is
an error. Tasks are read as they are needed, so the file's size does not matter. Grades arrive in
the order in which they are finished.

Workers are processes of this machine, or actors of a Ray cluster with one CPU each. The time limit
of a response is kept by the process pool where the function runs. What is waited for here is a Ray
actor itself: one that is lost with its machine is started again by Ray and the call repeated; one
that does not answer at all leaves its response without a score.
"""

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from verl.config.generation import EvaluationDataConfig
from verl.protocol.trajectory import Grade, InfraError
from verl.utils.dataset.quarantine import ANSWER_COLUMNS, ground_truth_of
from verl.utils.dataset.tables import BadRow, DataError, Row, open_table
from verl.utils.import_utils import require
from verl.workers.reward_manager.workers import MAX_RETRIES, WorkerPool

RewardFunction = Callable[..., Any]


class Workers(ABC):
    """Where reward functions run, `num_workers` at a time."""

    num_workers: int

    @abstractmethod
    async def grade(self, arguments: tuple[Any, ...]) -> Grade:
        """What `function(*arguments)` means; whatever happens, a grade comes back."""

    @abstractmethod
    def close(self) -> None:
        """End the processes."""


class LocalWorkers(Workers):
    def __init__(
        self, function: RewardFunction, *, num_workers: int, timeout_seconds: float
    ) -> None:
        self.num_workers = num_workers
        self._pool = isolated(function, timeout_seconds)
        self._threads = ThreadPoolExecutor(num_workers)

    async def grade(self, arguments: tuple[Any, ...]) -> Grade:
        call = self._pool.call
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, call, {"arguments": arguments})

    def close(self) -> None:
        self._pool.close()
        self._threads.shutdown()


@dataclass(frozen=True)
class Task:
    """One response; `row` and `number` (the response within its row) count from 1."""

    row: int
    number: int
    data_source: str
    response: str
    ground_truth: Any


def grade_all(
    tasks: Iterator[Task], workers: Workers, on_grade: Callable[[Task, Grade], None]
) -> None:
    """Grade every task; `on_grade` is called in this thread with each one and what came of it."""

    async def work() -> None:
        for task in tasks:  # shared: whoever is free takes the next one
            arguments = (task.data_source, task.response, task.ground_truth)
            on_grade(task, await workers.grade(arguments))

    async def run() -> None:
        await asyncio.gather(*(work() for _ in range(workers.num_workers)))

    asyncio.run(run())


def isolated(function: RewardFunction, timeout_seconds: float) -> WorkerPool:
    """Call it with `{"arguments": (...)}`: they are passed by position, in a worker process."""

    def call(arguments: tuple[Any, ...]) -> Any:
        result = function(*arguments)
        return asyncio.run(result) if inspect.iscoroutine(result) else result

    return WorkerPool(call, timeout_seconds=timeout_seconds)


START_SECONDS = 600.0
"""Timeout of the start of an actor on a busy cluster: placement and imports."""


class RayWorkers(Workers):
    """Starts Ray with `ray_init` unless it runs; `num_workers=None` takes one per CPU."""

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
        self.num_workers = num_workers or int(self._ray.cluster_resources()["CPU"])
        self._timeout_seconds = START_SECONDS + (1 + MAX_RETRIES) * timeout_seconds
        actor = self._ray.remote(num_cpus=1, max_restarts=-1, max_task_retries=MAX_RETRIES)(Grader)
        self._idle = [actor.remote(function, timeout_seconds) for _ in range(self.num_workers)]

    async def grade(self, arguments: tuple[Any, ...]) -> Grade:
        actor = self._idle.pop()
        try:
            return await asyncio.wait_for(actor.grade.remote(arguments), self._timeout_seconds)
        except asyncio.TimeoutError:
            text = f"a Ray actor gave no answer in {self._timeout_seconds} s"
            return InfraError(text, is_timeout=True)
        except self._ray.exceptions.RayError as error:
            return InfraError(f"a Ray actor failed: {error}")
        finally:
            self._idle.append(actor)

    def close(self) -> None:
        for actor in self._idle:
            self._ray.kill(actor)


class Grader:
    """What an actor runs."""

    def __init__(self, function: RewardFunction, timeout_seconds: float) -> None:
        self._pool = isolated(function, timeout_seconds)

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

"""Grades for many responses, in processes that can be killed.

    this thread, an event loop          workers
      num_workers coroutines: each        call the reward function; a process that takes too long
      takes the next task and waits       is killed, one that dies is replaced (`workers`)

Tasks are read as they are needed, so the file's size does not matter. Grades arrive in the order in
which they are finished. Workers are processes of this machine, or of a Ray cluster (`ray_workers`).
"""

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from verl.protocol.trajectory import Grade
from verl.trainer.evaluation.responses import Task
from verl.workers.reward_manager.workers import WorkerPool

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

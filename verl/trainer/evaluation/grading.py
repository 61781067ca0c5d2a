"""Grades for many responses, in processes that can be killed.

    this thread, an event loop          workers
      num_workers coroutines: each        call the reward function; a process that takes too long
      takes the next task and waits       is killed, one that dies is replaced

Tasks are read as they are needed, so the file's size does not matter. Grades arrive in the order in
which they are finished. Workers are processes of this machine, or actors of a Ray cluster with one
CPU each. The time limit of a response is kept by the process pool where the function runs. What is
waited for here is a Ray actor itself: one that is lost with its machine is started again by Ray and
the call repeated; one that does not answer at all leaves its response without a score.
"""

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from verl.protocol.trajectory import Grade, InfraError
from verl.trainer.evaluation.responses import Task
from verl.utils.import_utils import require
from verl.workers.reward_manager.worker_pool import MAX_RETRIES, WorkerPool

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


START_SECONDS = 600.0
"""For an actor to be placed and to import what it needs, when the cluster is busy."""


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

"""The managers `prime` and `remote`: the reward function in processes that can be killed.

For functions that use much processor time, may hang inside C code, or crash. The processes see the
program as it was when the manager was made. See `workers` for what happens to one that dies.
"""

import asyncio
import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from verl.protocol import DataProto
from verl.protocol.trajectory import Grade, Score, Trajectory
from verl.workers.reward_manager.abstract import with_accuracy
from verl.workers.reward_manager.grader import Grader
from verl.workers.reward_manager.managers import NaiveRewardManager
from verl.workers.reward_manager.service import GradingService
from verl.workers.reward_manager.workers import RayWorkerPool, WorkerPool, is_attached

DEFAULT_ITEM_SECONDS = 300.0
MAX_PROCESSES = 64


class PrimeRewardManager(NaiveRewardManager):
    """`num_workers` processes (one per core, at most 64), `timeout_seconds` for one response."""

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: Callable[..., Any] | None = None,
        reward_fn_key: str = "data_source",
        *,
        timeout_seconds: float = DEFAULT_ITEM_SECONDS,
        num_workers: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            tokenizer,
            num_examine,
            compute_score,
            reward_fn_key,
            timeout_seconds=timeout_seconds,
            num_workers=one_per_core() if num_workers is None else num_workers,
            isolate=True,
            **kwargs,
        )

    def __call__(self, data: DataProto, return_dict: bool = False) -> Tensor | dict[str, Any]:
        return with_accuracy(data, super().__call__(data, return_dict))


class RemoteRewardManager(PrimeRewardManager):
    """`prime` with `reward_model.num_workers` processes beside the trainer on its machine.

    Where the program is attached to a Ray cluster, they are actors of the cluster. An async
    function gets an event loop in each.
    """

    @classmethod
    def options_of(cls, config: Any) -> dict[str, Any]:
        section = config["reward_model"]
        options: dict[str, Any] = {"make_pool": RayWorkerPool} if is_attached() else {}
        if "num_workers" in section:
            options["num_workers"] = section["num_workers"]
        return options


def one_per_core() -> int:
    return min(MAX_PROCESSES, os.cpu_count() or 1)


class PositionalCalls(Grader):
    """Calls `function(*row["arguments"])` for each trajectory, in `num_processes` processes."""

    name = "the reward function"
    is_blocking = True
    has_own_deadline = True

    def __init__(
        self, function: Callable[..., Any], *, timeout_seconds: float, num_processes: int
    ) -> None:
        self.timeout_seconds = timeout_seconds
        self.max_concurrent = num_processes
        self._pool = positional_pool(function, timeout_seconds)

    async def grade(self, trajectory: Trajectory) -> Grade:
        return self._pool.call({"arguments": trajectory.row["arguments"]})

    def close(self) -> None:
        self._pool.close()


def positional_pool(function: Callable[..., Any], timeout_seconds: float) -> WorkerPool:
    """Call it with `{"arguments": (...)}`: the function, async or not, gets them by position."""

    def call(arguments: tuple[Any, ...]) -> Any:
        result = function(*arguments)
        return asyncio.run(result) if inspect.iscoroutine(result) else result

    return WorkerPool(call, timeout_seconds=timeout_seconds)


async def parallel_compute_score_async(
    evaluation_func: Callable[..., Any],
    completions: Sequence[str],
    references: Sequence[Any],
    tasks: Sequence[str],
    extra_info: Sequence[Any] | None = None,
    num_processes: int = MAX_PROCESSES,
) -> list[float | None]:
    """Score completions in processes: `evaluation_func(task, completion, reference, extra_info)`.

    The scores stand in the order of the completions. One that could not be scored (an error, more
    than 300 seconds, a process that died again and again) has None: it is not a score of 0.
    """
    infos = [None] * len(completions) if extra_info is None else extra_info
    calls = enumerate(zip(tasks, completions, references, infos, strict=True))
    trajectories = [
        Trajectory(uid=str(row), sample=0, row={"arguments": arguments}) for row, arguments in calls
    ]
    grader = PositionalCalls(
        evaluation_func, timeout_seconds=DEFAULT_ITEM_SECONDS, num_processes=num_processes
    )
    service = GradingService(grader)
    try:
        await asyncio.wrap_future(service.grade_once(trajectories))
    finally:
        service.close()
        grader.close()
    return [t.grade.value if isinstance(t.grade, Score) else None for t in trajectories]

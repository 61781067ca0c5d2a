"""Workers on a Ray cluster: each is an actor with one CPU and a process that can be killed.

The time limit of a response is kept by the actor's own process pool, where the function runs. What
is waited for here is the actor itself: one that is lost with its machine is started again by Ray
and the call repeated; one that does not answer at all leaves its response without a score.
"""

import asyncio
from typing import Any

from verl.protocol.trajectory import Grade, InfraError
from verl.trainer.evaluation.grading import RewardFunction, Workers, isolated
from verl.utils.import_utils import require
from verl.workers.reward_manager.workers import MAX_RETRIES

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
        self._patience_seconds = START_SECONDS + (1 + MAX_RETRIES) * timeout_seconds
        actor = self._ray.remote(num_cpus=1, max_restarts=-1, max_task_retries=MAX_RETRIES)(Grader)
        self._idle = [actor.remote(function, timeout_seconds) for _ in range(self.num_workers)]

    async def grade(self, arguments: tuple[Any, ...]) -> Grade:
        actor = self._idle.pop()
        try:
            return await asyncio.wait_for(actor.grade.remote(arguments), self._patience_seconds)
        except asyncio.TimeoutError:
            text = f"a Ray actor gave no answer in {self._patience_seconds} s"
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

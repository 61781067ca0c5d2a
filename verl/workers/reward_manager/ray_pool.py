"""Calls a reward function in actors of the Ray cluster that this program is attached to.

The same promises as `worker_pool`, on all machines of the cluster: a call that takes too long ends
with its actor killed, a call whose actor died is made again on a new one. The actors take any
function that Ray can ship.
"""

import asyncio
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from verl.protocol.trajectory import Grade, InfraError
from verl.utils.import_utils import require
from verl.workers.reward_manager.worker_pool import MAX_RETRIES
from verl.workers.reward_manager.worker_process import grade_of

START_SECONDS = 120.0
"""Until an actor answers for the first time; it has to import the package."""


def is_attached() -> bool:
    """Whether somebody has connected this program to a cluster; Ray is not loaded to find out."""
    return "ray" in sys.modules and require("ray").is_initialized()


class RayWorker:
    """What runs in the actor."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._loop = asyncio.new_event_loop()

    def ready(self) -> bool:
        return True

    def grade(self, kwargs: dict[str, Any]) -> Grade:
        return grade_of(self._function, kwargs, self._loop)


class RayWorkerPool:
    """`call(kwargs)` is the grade that `function(**kwargs)` means, found in an actor."""

    def __init__(self, function: Callable[..., Any], *, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self._function = function
        self._ray: Any = require("ray", extra="ray")
        self._idle: list[Any] = []
        self._lock = threading.Lock()

    def close(self) -> None:
        for actor in self._idle:
            self._ray.kill(actor)
        self._idle.clear()

    def call(self, kwargs: Mapping[str, Any]) -> Grade:
        for _ in range(1 + MAX_RETRIES):
            grade = self._call_once(dict(kwargs))
            if grade is not None:
                return grade
        return InfraError(
            f"{1 + MAX_RETRIES} actors died one after another while they graded this response",
            is_final=True,
        )

    def _call_once(self, kwargs: dict[str, Any]) -> Grade | None:
        """None if the actor died."""
        errors = self._ray.exceptions
        actor = self._take()
        try:
            self._ray.get(actor.ready.remote(), timeout=START_SECONDS)
            grade = self._ray.get(actor.grade.remote(kwargs), timeout=self.timeout_seconds)
        except errors.GetTimeoutError:
            self._ray.kill(actor)
            text = f"the reward function took longer than {self.timeout_seconds} s"
            return InfraError(text, is_timeout=True)
        except errors.RayActorError:
            return None
        with self._lock:
            self._idle.append(actor)
        return grade

    def _take(self) -> Any:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return self._ray.remote(num_cpus=0)(RayWorker).remote(self._function)

"""`Grader`: what gives trajectories their grades, and how a reward function's result is read.

A grader may raise, hang or return nonsense. `GradingService` calls it, keeps its deadlines, and is
the only place where any of that becomes an `InfraError`; a grader catches nothing itself.

`as_grade` reads what a reward function returned. `as_result` and `from_result` translate a grade to
and from the mapping that `run_single` of a reward manager returns.
"""

import asyncio
import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Number
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from verl.protocol.trajectory import Abstain, Grade, InfraError, Score, Trajectory
from verl.utils.environment import WentWrong
from verl.utils.processes import forks_end_here
from verl.utils.rollout_trace import rollout_trace_span

DEFAULT_TIMEOUT_SECONDS = 60.0
MAX_REWARD = torch.finfo(torch.float32).max

Result = TypeVar("Result")


class Grader(ABC):
    """Grades trajectories one by one, group by group, or a step at a time.

    A grader of scope "trajectory" defines `grade`, one of scope "group" or "step" `grade_many`.
    """

    name: str = "the grader"
    """Subject of messages about its failures."""

    scope: Literal["trajectory", "group", "step"] = "trajectory"
    """What must be complete before the grader is called."""

    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    """Deadline of one call."""

    has_own_deadline: bool = False
    """The grader ends every call in time by itself, so the service sets no deadline."""

    max_concurrent: int = 64
    """Calls at the same time."""

    is_blocking: bool = False
    """Calls run on worker threads; its coroutines never wait for an event loop."""

    is_retryable: bool = True
    """Groups in which grading failed may be graded a second time without the others."""

    def prepare(self, trajectories: Sequence[Trajectory]) -> None:  # noqa: B027
        """Work that is cheaper for many at once, such as decoding; precedes their calls."""

    @abstractmethod
    async def grade(self, trajectory: Trajectory) -> Grade:
        """The grade of one trajectory, which stays as it is."""

    async def grade_many(self, trajectories: Sequence[Trajectory]) -> list[Grade]:
        """The grades of a group or a step, in order."""
        return [await self.grade(trajectory) for trajectory in trajectories]


def as_grade(result: Any) -> Grade:
    """What a reward function's return value means.

    A number (bool, NumPy or a tensor of one element included) is a score; a mapping has one under
    `score`, and its other entries are reported; None abstains. Anything else is an infra error.
    """
    if isinstance(result, Score | Abstain | InfraError):
        return checked(result)
    if result is None:
        return Abstain("the reward function returned None")
    if inspect.iscoroutine(result):
        result.close()  # nobody would ever run it
        return InfraError("the reward function returned a coroutine; declare it `async def`")
    if isinstance(result, Mapping):
        if result.get("score") is None:
            return InfraError(f"the reward function returned a mapping without score: {result!r}")
        extras = {str(key): value for key, value in result.items() if key != "score"}
        grade = as_grade(result["score"])
        return Score(grade.value, extras) if isinstance(grade, Score) else grade
    kind = type(result).__name__
    try:
        if isinstance(result, Tensor | np.ndarray):
            if result.shape.numel() != 1 if isinstance(result, Tensor) else result.size != 1:
                shape = tuple(result.shape)
                return InfraError(f"the reward function returned {shape} values for one response")
            result = result.item()
        if not isinstance(result, Number | np.bool_) or isinstance(result, complex):
            return InfraError(f"the reward function returned {kind}: {result!r:.200}")
        value = float(result)  # pyright: ignore[reportArgumentType]
    except Exception as error:  # a tensor without data, an object that cannot be printed
        return InfraError(f"the reward function returned {kind}, which cannot be read: {error!r}")
    # A number by itself is also what validation calls accuracy.
    return checked(Score(value, {"acc": value}))


def checked(grade: Grade) -> Grade:
    """The grade; a score that is not finite in float32, the type of rewards, is an infra error."""
    if isinstance(grade, Score) and not abs(grade.value) <= MAX_REWARD:
        return InfraError(f"the reward function returned {grade.value}")
    return grade


def has_failed(trajectory: Trajectory) -> bool:
    """Whether grading ended in an infra error."""
    return isinstance(trajectory.grade, InfraError)


def drop_reason(grades: Sequence[Grade | None], lost: Sequence[Trajectory] = ()) -> str | None:
    """Why a group with these grades cannot be trained on; None if it can.

    `lost` are those that never came to be graded. They leave the group as those do on which the
    grader abstains.
    """
    errors = [grade for grade in grades if isinstance(grade, InfraError)]
    gone = [grade for grade in grades if isinstance(grade, Abstain)]
    gone += [t.grade for t in lost if isinstance(t.grade, Abstain | InfraError)]
    num_scores = sum(isinstance(grade, Score) for grade in grades)
    if errors:
        return errors[0].reason
    return gone[0].reason if gone and num_scores < 2 else None


class RewardError(WentWrong, RuntimeError):
    """Scoring a batch failed; the cause is the error in the reward function or its manager."""


def infra_error_of(
    error: BaseException, name: str, timeout_seconds: float | None = None
) -> InfraError:
    """What a grader's exception means; `name` is the grader's."""
    if isinstance(error, RewardError):
        return InfraError(str(error))
    is_timeout = isinstance(error, TimeoutError | asyncio.TimeoutError)
    if is_timeout and timeout_seconds is not None and not str(error):
        return InfraError(f"{name} took longer than {timeout_seconds} s", is_timeout=True)
    text = f"{type(error).__name__}: {error}" if isinstance(error, Exception) else repr(error)
    return InfraError(f"{name} raised {text}", is_timeout=is_timeout)


def as_result(grade: Grade) -> dict[str, Any]:
    """The grade as `run_single` returns it: `reward_score` and `reward_extra_info`.

    Without a verdict the score reads 0.0, as those who look at nothing else expect, and a third
    entry, `abstained` or `fault`, says that it is none; `from_result` and training go by that.
    """
    if isinstance(grade, Score):
        return {"reward_score": grade.value, "reward_extra_info": dict(grade.extras)}
    if isinstance(grade, Abstain):
        return {"reward_score": 0.0, "reward_extra_info": {}, "abstained": grade.reason}
    extras = {"timeout": True} if grade.is_timeout else {"error": grade.reason}
    return {
        "reward_score": 0.0,
        "reward_extra_info": {**extras, "acc": 0.0},
        "fault": grade.reason,
        "is_final": grade.is_final,
    }


def from_result(result: Any) -> Grade:
    """The grade that a manager's `run_single` means; anything but such a mapping is an error."""
    if not isinstance(result, Mapping) or "reward_score" not in result:
        return InfraError(
            f"run_single returned {result!r:.200}; it must return a mapping with reward_score"
        )
    extras = result.get("reward_extra_info") or {}
    if "fault" in result:
        is_timeout, is_final = bool(extras.get("timeout")), bool(result.get("is_final"))
        return InfraError(result["fault"], is_timeout=is_timeout, is_final=is_final)
    if "abstained" in result:
        return Abstain(result["abstained"])
    grade = as_grade(result["reward_score"])
    return Score(grade.value, dict(extras)) if isinstance(grade, Score) else grade


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives a coroutine; also for partial and callable objects."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or (
        not inspect.isroutine(function) and inspect.iscoroutinefunction(type(function).__call__)
    )


@contextmanager
def traced(call: Sequence[Trajectory]) -> Iterator[Callable[[Result], Result]]:
    """A span of the trace around a call; what it yields passes the grades on, and tells them."""
    with rollout_trace_span("grade", {"of": [t.session_uid for t in call]}) as record:

        def told(grades: Result) -> Result:
            if record is not None:
                record(str(grades))
            return grades

        yield told


async def contained(work: Awaitable[Result]) -> Result:
    """Await `work`; `SystemExit` and the like end the call, not the event loop.

    A fork of it ends here, before it comes to the loop, which it would share.
    """
    try:
        with forks_end_here():
            return await work
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(repr(error)) from error

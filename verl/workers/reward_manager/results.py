"""What grading one response can give: a score, no verdict, or a fault.

The three are different things and stay so: a fault in a grader says nothing about the response, so
it never becomes a reward. `as_grade` reads what a reward function returned, `as_result` and
`from_result` go to and from the mapping that `run_single` of a reward manager returns.
"""

import inspect
import math
from collections.abc import Mapping
from numbers import Number
from typing import Any

import numpy as np
from torch import Tensor

from verl.protocol.trajectory import Abstain, Grade, InfraError, Score

GRADE_COLUMN = "__grade__"
"""Column of a batch whose responses were graded while they were generated, as `as_result`."""


def as_grade(result: Any) -> Grade:
    """What a reward function's return value means.

    A number (bool, NumPy or a tensor of one element included) is a score; a mapping has one under
    `score`, and its other entries are reported; None abstains. Anything else is a fault.
    """
    if isinstance(result, Score | Abstain | InfraError):
        return result
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
    if isinstance(result, Tensor | np.ndarray):
        if result.size != 1 if isinstance(result, np.ndarray) else result.numel() != 1:
            shape = tuple(result.shape)
            return InfraError(f"the reward function returned {shape} values for one response")
        result = result.item()
    if not isinstance(result, Number | np.bool_) or isinstance(result, complex):
        return InfraError(f"the reward function returned {type(result).__name__}: {result!r:.200}")
    value = float(result)  # pyright: ignore[reportArgumentType]
    if not math.isfinite(value):
        return InfraError(f"the reward function returned {value}")
    # A number by itself is also what validation calls accuracy.
    return Score(value, {"acc": value})


def safe_grade(result: Any) -> Grade:
    """`as_grade` for objects that may themselves fail, such as a tensor without data."""
    try:
        return as_grade(result)
    except Exception as error:
        kind = type(result).__name__
        return InfraError(f"the reward function returned {kind}, which cannot be read: {error!r}")


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
    """The grade that a manager's `run_single` means; anything but such a mapping is a fault."""
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
    grade = safe_grade(result["reward_score"])
    return Score(grade.value, dict(extras)) if isinstance(grade, Score) else grade

"""What grading one response can give: a score, no verdict, or a fault.

The three are different things and stay so: a fault in a grader says nothing about the response, so
it never becomes a reward.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Number
from typing import Any

import numpy as np
from torch import Tensor


@dataclass(frozen=True)
class Score:
    """A verdict: a finite number, and whatever else the grader reported."""

    value: float
    extras: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Abstain:
    """The grader cannot judge this response; it takes no part in training."""

    reason: str


@dataclass(frozen=True)
class InfraError:
    """Grading failed: an exception, a time-out, an answer that is no score."""

    reason: str
    is_timeout: bool = False


Grade = Score | Abstain | InfraError


def as_grade(result: Any) -> Grade:
    """What a reward function's return value means.

    A number (bool, NumPy or a tensor of one element included) is a score; a mapping has one under
    `score`, and its other entries are reported; None abstains. Anything else is a fault.
    """
    if result is None:
        return Abstain("the reward function returned None")
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

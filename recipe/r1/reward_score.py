"""Scores of public benchmarks: `custom_reward_function.{path=recipe/r1/reward_score.py,
name=reward_func}`.

A multiple-choice answer (GPQA) is the last `Answer: X`; a number or formula (AIME, CNMO) is the
last `\\boxed{...}`, compared as mathematics. A benchmark that is not listed is an error, not 0.
"""

import re
from typing import Any

from verl.utils.reward_score import math_verify

CHOICE = re.compile(r"answer\s*:\s*\**\s*\$?\(?([A-D])\b", re.IGNORECASE)
MATHEMATICS = ("AIME", "cnmo", "MATH")


def reward_func(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None
) -> float:
    """1 for a right answer and 0 for another."""
    if "gpqa" in data_source.lower():
        found = CHOICE.findall(solution_str)
        return float(bool(found) and found[-1].upper() == str(ground_truth).upper())
    if any(name.lower() in data_source.lower() for name in MATHEMATICS):
        return float(math_verify.compute_score(solution_str, str(ground_truth)))
    raise ValueError(
        f"recipe/r1/reward_score.py has no rule for data_source {data_source!r}; it knows GPQA, "
        f"{', '.join(MATHEMATICS)}. For others use verl's own graders (leave "
        "custom_reward_function.path out) or a function of yours"
    )

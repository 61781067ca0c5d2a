"""What earns a reward: the right number after `####`. How it was found does not matter."""

import re
from typing import Any

ANSWER = re.compile(r"#### (\d+)")


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    **kwargs: Any,
) -> dict[str, float]:
    """1 for a right answer, else 0; `worked_out` is only reported."""
    answers = ANSWER.findall(solution_str)
    is_right = answers[-1:] == [ground_truth]
    return {"score": float(is_right), "worked_out": float("=" in solution_str)}

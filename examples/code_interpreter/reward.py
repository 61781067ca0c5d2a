"""What earns a reward: the right number after `####`. Whether a program ran is only reported."""

import re
from typing import Any

ANSWER = re.compile(r"#### (-?\d{1,32})")


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    **kwargs: Any,
) -> dict[str, float]:
    is_right = ANSWER.findall(solution_str)[-1:] == [ground_truth]
    return {"score": float(is_right), "called": float("<tool_call>" in solution_str)}

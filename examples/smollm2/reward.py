"""The reward of a sum: is it right, and was it said as asked?"""

import re
from typing import Any

NUMBER = re.compile(r"\d+")


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    **kwargs: Any,
) -> dict[str, float]:
    """0.5 if the last number is the right one, and 0.5 more if there is nothing but it."""
    numbers = NUMBER.findall(solution_str)
    is_right = numbers[-1:] == [ground_truth]
    is_bare = solution_str.strip() == ground_truth
    return {"score": 0.5 * is_right + 0.5 * is_bare, "acc": float(is_right)}

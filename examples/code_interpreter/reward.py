"""ReTool's score: 1 for the right number in a box, else -1. Whether a program ran is reported."""

from typing import Any

from recipe.retool.retool import compute_score as retool_score


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    score = retool_score(data_source, solution_str, ground_truth, extra_info)
    return {**score, "called": float("<tool_call>" in solution_str)}

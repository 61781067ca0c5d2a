"""What earns a reward: the right number. Whether the model searched is only reported."""

from typing import Any

from verl.utils.reward_score.search_r1_like_qa_em import extract_solution


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    **kwargs: Any,
) -> dict[str, float]:
    is_right = extract_solution(solution_str) == ground_truth
    return {
        "score": float(is_right),
        "acc": float(is_right),
        "called": float("<tool_call>" in solution_str),
    }

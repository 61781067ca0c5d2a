"""What earns a reward: the number of squares, and nothing else."""

from typing import Any


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    **kwargs: Any,
) -> float:
    return float(solution_str.strip() == ground_truth)

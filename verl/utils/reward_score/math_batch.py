"""The batch form of `math_reward`: one call for all responses, for the reward manager `batch`."""

from collections.abc import Sequence
from typing import Any

from verl.utils.reward_score import math_reward


def compute_score_batched(
    data_sources: Sequence[str],
    solution_strs: Sequence[str],
    ground_truths: Sequence[str],
    extra_infos: Sequence[Any],
) -> list[float]:
    """The score of each solution by its ground truth, in their order."""
    return [
        math_reward.compute_score(solution, truth)
        for solution, truth in zip(solution_strs, ground_truths, strict=True)
    ]

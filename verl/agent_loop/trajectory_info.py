"""Which trajectory is which, for traces: the step, the dataset's row, the sample's number."""

from collections.abc import Sequence
from typing import Any


async def get_trajectory_info(
    step: int, index: Sequence[Any], validate: bool
) -> list[dict[str, Any]]:
    """One entry per row; `rollout_n` counts the samples of one row, which stand side by side."""
    return trajectory_info(step, index, validate)


def trajectory_info(step: int, index: Sequence[Any], validate: bool) -> list[dict[str, Any]]:
    infos: list[dict[str, Any]] = []
    for place, row in enumerate(index):
        is_same_row = place > 0 and index[place - 1] == row
        number = infos[-1]["rollout_n"] + 1 if is_same_row else 0
        infos.append({"step": step, "sample_index": row, "rollout_n": number, "validate": validate})
    return infos

"""Scores for a batch of responses, from the grades of its groups.

Grades come with the batch, if its responses were graded while they were generated, or are waited
for now. `GradingService` decides which groups are dropped; here the others become a batch with
`token_level_scores`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from verl.agent_loop.manager import GRADE_COLUMN
from verl.protocol import DataProto
from verl.protocol.trajectory import Abstain, Grade, Group, Score, Trajectory
from verl.workers.reward_manager.abstract import graded_rewards, precomputed_rewards
from verl.workers.reward_manager.adapters import (
    BatchGrader,
    as_grader,
    groups_of,
    row_trajectories,
    rows_as_batch,
)
from verl.workers.reward_manager.grader import RewardError
from verl.workers.reward_manager.service import GradingService


@dataclass(kw_only=True)
class Scored:
    """The batch with its scores, without what could not be scored."""

    batch: DataProto
    extras: dict[str, list[Any]]
    metrics: dict[str, float]
    dropped: dict[str, str] = field(default_factory=dict)
    """uid -> reason, for each prompt that takes no part in this step."""


def score_batch(batch: DataProto, reward_fn: Callable[..., Any]) -> Scored:
    """Add `token_level_scores`, and each thing the grader reported as a column of its own."""
    return settled(batch, *graded(batch, reward_fn))


def graded(
    batch: DataProto, reward_fn: Callable[..., Any]
) -> tuple[list[Trajectory], list[Group], int]:
    """The rows of a batch with their final grades, their groups, and how many calls failed."""
    early = batch.non_tensor_batch.pop(GRADE_COLUMN, None)
    trajectories = row_trajectories(batch)
    grader = as_grader(reward_fn, rows_as_batch(batch))
    if early is None and not isinstance(grader, BatchGrader):
        early = precomputed_grades(batch)
    for trajectory, grade in zip(trajectories, [] if early is None else early, strict=False):
        trajectory.grade = grade
    groups = groups_of(trajectories)
    service = GradingService(grader)
    try:
        num_errors = service.wait(groups)
    finally:
        service.close()
    return trajectories, groups, num_errors


def precomputed_grades(batch: DataProto) -> list[Grade] | None:
    """The grades of a batch that carries `rm_scores`."""
    result = precomputed_rewards(batch)
    if result is None:
        return None
    extras, rewards = result["reward_extra_info"], result["reward_tensor"]
    token_values = rewards.cpu().numpy()
    return [
        Score(value, {name: values[row] for name, values in extras.items()}, token_values[row])
        for row, value in enumerate(rewards.sum(-1).tolist())
    ]


def settled(
    batch: DataProto,
    trajectories: Sequence[Trajectory],
    groups: Sequence[Group],
    num_errors: int,
) -> Scored:
    """The scores of `batch`, whose rows are `trajectories`, without those of dropped groups."""
    dropped = {group.uid: group.fault for group in groups if group.fault is not None}
    rows = [
        row
        for row, trajectory in enumerate(trajectories)
        if trajectory.uid not in dropped and isinstance(trajectory.grade, Score)
    ]
    if not rows:
        reason = next(iter(dropped.values()))
        raise RewardError(f"none of {len(batch)} responses could be scored: {reason}")
    num_abstained = sum(isinstance(trajectory.grade, Abstain) for trajectory in trajectories)
    if len(rows) < len(batch):
        batch = batch.select_idxs(rows)
    result = graded_rewards(batch, [trajectories[row].grade for row in rows])
    extras = result["reward_extra_info"]
    batch.batch["token_level_scores"] = result["reward_tensor"]
    for name, values in extras.items():
        column = np.empty(len(batch), dtype=object)
        column[:] = values
        batch.non_tensor_batch[name] = column
    batch.meta_info["reward_extra_keys"] = list(extras)
    metrics = {
        "reward/num_errors": float(num_errors),
        "reward/num_abstained": float(num_abstained),
        "reward/num_groups_set_aside": float(len(dropped)),
    }
    return Scored(batch=batch, extras=extras, metrics=metrics, dropped=dropped)


def reported_metrics(batch: DataProto) -> dict[str, float]:
    """`reward/<name>/mean` of every number that the grader reported; None counts as missing."""
    metrics: dict[str, float] = {}
    for name in batch.meta_info.get("reward_extra_keys", []):
        values = [value for value in batch.non_tensor_batch[name] if _is_number(value)]
        if values:
            metrics[f"reward/{name}/mean"] = float(np.mean([float(value) for value in values]))
    return metrics


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float | np.bool_ | np.number)

"""Scores for a batch of responses, and what happens to those that have none.

Grades come with the batch, if its responses were graded while they were generated, or from the
reward manager now. A group (the responses to one prompt) in which grading fails is graded again as
a whole. If that fails too the group is set aside: a prompt is compared with all of its responses or
not at all. A response on which the grader abstains leaves its group, which needs at least two
others to be compared with. A fault never becomes a reward.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from verl.protocol import DataProto
from verl.trainer.ppo.reward import RewardError, compute_reward
from verl.workers.reward_manager.abstract import precomputed_rewards
from verl.workers.reward_manager.grader import (
    GRADE_COLUMN,
    Abstain,
    Grade,
    InfraError,
    Score,
    from_result,
)
from verl.workers.reward_manager.grading import graded_rewards

logger = logging.getLogger(__name__)


@runtime_checkable
class Grader(Protocol):
    """A reward manager that says of each response whether it could be graded."""

    def grade(self, data: DataProto) -> list[Grade]: ...


@dataclass(kw_only=True)
class Scored:
    """The batch with its scores, without what could not be scored."""

    batch: DataProto
    extras: dict[str, list[Any]]
    metrics: dict[str, float]
    set_aside: dict[str, str] = field(default_factory=dict)
    """uid -> reason, for each prompt that takes no part in this step."""


def score_batch(batch: DataProto, reward_fn: Callable[..., Any]) -> Scored:
    """Add `token_level_scores`, and each thing the grader reported as a column of its own."""
    if precomputed_rewards(batch) is not None or not isinstance(reward_fn, Grader):
        rewards, extras = compute_reward(batch, reward_fn)
        return _with_scores(batch, rewards, extras, Scored(batch=batch, extras={}, metrics={}))
    return settled(batch, *graded(batch, reward_fn))


def settled(batch: DataProto, grades: Sequence[Grade], num_faults: int) -> Scored:
    """The scores that grades amount to; `num_faults` calls failed on the way."""
    keep, set_aside = settle_groups(batch.non_tensor_batch["uid"], grades)
    if not any(keep):
        reason = next(iter(set_aside.values()))
        raise RewardError(f"none of {len(batch)} responses could be scored: {reason}")
    kept_grades = [grade for grade, is_kept in zip(grades, keep, strict=True) if is_kept]
    kept = batch if all(keep) else batch.select_idxs(np.flatnonzero(keep))
    result = graded_rewards(kept, kept_grades)
    metrics = {
        "reward/num_errors": float(num_faults),
        "reward/num_abstained": float(sum(isinstance(grade, Abstain) for grade in grades)),
        "reward/num_groups_set_aside": float(len(set_aside)),
    }
    scored = Scored(batch=kept, extras={}, metrics=metrics, set_aside=set_aside)
    return _with_scores(kept, result["reward_tensor"], result["reward_extra_info"], scored)


def graded(batch: DataProto, grader: Grader) -> tuple[list[Grade], int]:
    """Grades of all responses, groups with a fault tried twice; and how many calls failed."""
    uids = batch.non_tensor_batch["uid"]
    grades = _grades_of_generation(batch) or grader.grade(batch)
    _check_count(grades, batch)
    faults = [grade for grade in grades if isinstance(grade, InfraError)]
    faulty = {uid for uid, grade in zip(uids, grades, strict=True) if _may_be_tried_again(grade)}
    if not faulty:
        return grades, len(faults)
    logger.warning("grading failed %d times, e.g. %s; trying again", len(faults), faults[0].reason)
    rows = [row for row, uid in enumerate(uids) if uid in faulty]
    again = grader.grade(batch.select_idxs(rows))
    _check_count(again, rows)
    for row, grade in zip(rows, again, strict=True):
        grades[row] = grade
    return grades, len(faults) + sum(isinstance(grade, InfraError) for grade in again)


def settle_groups(
    uids: Sequence[str] | np.ndarray, grades: Sequence[Grade]
) -> tuple[list[bool], dict[str, str]]:
    """Which rows stay, and the reason for each prompt that goes."""
    rows_of: dict[str, list[int]] = {}
    for row, uid in enumerate(uids):
        rows_of.setdefault(uid, []).append(row)
    keep = [True] * len(grades)
    set_aside: dict[str, str] = {}
    for uid, rows in rows_of.items():
        scored = [row for row in rows if isinstance(grades[row], Score)]
        faults = [grade for row in rows if isinstance(grade := grades[row], InfraError)]
        abstained = [grade for row in rows if isinstance(grade := grades[row], Abstain)]
        if faults:
            set_aside[uid], scored = faults[0].reason, []
        elif abstained and len(scored) < 2:
            set_aside[uid], scored = abstained[0].reason, []
        for row in set(rows) - set(scored):
            keep[row] = False
    return keep, set_aside


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


def _grades_of_generation(batch: DataProto) -> list[Grade] | None:
    """What the agent loops have found out already; taken from the batch, for it serves once."""
    results = batch.non_tensor_batch.pop(GRADE_COLUMN, None)
    return None if results is None else [from_result(result) for result in results]


def _may_be_tried_again(grade: Grade) -> bool:
    return isinstance(grade, InfraError) and not grade.is_final


def _with_scores(batch: DataProto, rewards: Any, extras: dict[str, Any], scored: Scored) -> Scored:
    batch.batch["token_level_scores"] = rewards
    for name, values in extras.items():
        column = np.empty(len(batch), dtype=object)
        column[:] = values
        batch.non_tensor_batch[name] = column
    batch.meta_info["reward_extra_keys"] = list(extras)
    scored.extras = {name: list(values) for name, values in extras.items()}
    return scored


def _check_count(grades: Sequence[Grade], rows: Any) -> None:
    if len(grades) != len(rows):
        raise RewardError(
            f"the reward manager gave {len(grades)} grades for {len(rows)} responses; each of them "
            "needs its own"
        )

"""Scores for a batch of responses, from the grades of its groups and from a reward model.

Trajectories have their grades already, if they were graded while others were generated, or get them
now. `GradingService` decides which groups are dropped; the others become a batch with
`token_level_scores`. Where a reward model is enabled, its scores enter the batch first:

    reward_model.enable alone       the model's score is the reward (`rm_scores`)
    with a function per response    the function decides; it finds the model's score in
                                    `extra_info["rm_score"]`
    with a function over the batch, or a manager of one's own
                                    it decides; `rm_scores` is in the batch it is given

The model's scores are a column that graders read, as log-probs are one that losses read; the model
is no grader itself. Its ranks are workers of the run, with the run's own answer to a failure: an
error ends it, a rank that dies has it started over from the checkpoint. An infra error would hide
both, ask a dead rank once more and drop all groups of the step.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from verl.algos.sessions import one_row_per_session, session_ends
from verl.config.ppo import PPOConfig
from verl.config.reward import McoreRewardModelConfig
from verl.protocol import DataProto
from verl.protocol.padded import SESSION_UID
from verl.protocol.trajectory import Abstain, Grade, Group, InfraError, Score, Trajectory
from verl.trainer.ppo.reward import WholeBatchReward, get_custom_reward_fn, takes_whole_batch
from verl.trainer.ppo.utils import need_reward_model
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


def score_batch(
    batch: DataProto,
    reward_fn: Callable[..., Any],
    groups: Sequence[Group] = (),
    grading: GradingService | None = None,
) -> Scored:
    """Add `token_level_scores`, and each thing the grader reported as a column of its own.

    `groups` and `grading` are those of `graded`. Of a session with several rows the last one is
    graded and bears the score; the other rows stay with it, or go with it.
    """
    ends = one_row_per_session(batch)
    scored = _with_scores(ends, *graded(ends, reward_fn, groups, grading))
    return scored if ends is batch else _with_other_rows(scored, batch)


def graded(
    batch: DataProto,
    reward_fn: Callable[..., Any],
    groups: Sequence[Group] = (),
    grading: GradingService | None = None,
) -> tuple[list[Trajectory], list[Group], int]:
    """The rows of a batch with their final grades, their groups, and how many calls failed.

    If `grading` has graded the trajectories of `groups` as they ended, and the batch still has all
    of them, only infra errors are retried. Otherwise `reward_fn` grades the rows of the batch.
    """
    trajectories = [trajectory for group in groups for trajectory in group.last_rows]
    lost = {group.uid: group.lost for group in groups if group.lost}
    is_graded = bool(groups) and all(trajectory.grade is not None for trajectory in trajectories)
    uids = batch.non_tensor_batch["uid"]
    if grading is not None and is_graded and [t.uid for t in trajectories] == uids.tolist():
        return trajectories, list(groups), grading.wait(groups)
    grader = as_grader(reward_fn, rows_as_batch(batch))
    grades = None if isinstance(grader, BatchGrader) else precomputed_grades(batch)
    if grades is None:
        trajectories = row_trajectories(batch)
    else:  # nobody will look at the responses again
        trajectories = [
            Trajectory(uid=str(uid), sample=row, row={}, grade=grade)
            for row, (uid, grade) in enumerate(zip(uids, grades, strict=True))
        ]
    groups = groups_of(trajectories)
    for group in groups:
        group.lost = lost.pop(group.uid, [])
    groups += [Group(index=-1, uid=uid, drawn_at=-1, lost=gone) for uid, gone in lost.items()]
    service = GradingService(grader)
    try:
        num_errors = service.wait(groups)
    finally:
        service.close()
    return trajectories, groups, num_errors


def precomputed_grades(batch: DataProto) -> list[Grade] | None:
    """The grades of a batch that carries `rm_scores`; one that is not finite is a fault."""
    result = precomputed_rewards(batch)
    if result is None:
        return None
    extras, rewards = result["reward_extra_info"], result["reward_tensor"]
    token_values = rewards.cpu().numpy()
    return [
        Score(value, {name: values[row] for name, values in extras.items()}, token_values[row])
        if math.isfinite(value)
        else InfraError(f"the score that came with the response is {value}", is_final=True)
        for row, value in enumerate(rewards.sum(-1).tolist())
    ]


def _with_scores(
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


def _with_other_rows(scored: Scored, batch: DataProto) -> Scored:
    """The scores of last rows in a batch that has all rows of their sessions; what was reported is
    None on the others."""
    place_of = {uid: n for n, uid in enumerate(scored.batch.non_tensor_batch[SESSION_UID])}
    uids = batch.non_tensor_batch[SESSION_UID]
    whole = batch.select_idxs([row for row, uid in enumerate(uids) if uid in place_of])
    ends = session_ends(whole)
    assert ends is not None
    places = [place_of[uid] for uid in whole.non_tensor_batch[SESSION_UID][ends]]
    found = scored.batch.batch["token_level_scores"]
    rewards = found.new_zeros(len(whole), found.shape[1])
    rewards[ends] = found[places]
    whole.batch["token_level_scores"] = rewards
    for name, values in scored.extras.items():
        whole.non_tensor_batch[name] = np.full(len(whole), None, dtype=object)
        for row, place in zip(ends, places, strict=True):
            whole.non_tensor_batch[name][row] = values[place]
    whole.meta_info["reward_extra_keys"] = list(scored.extras)
    return replace(scored, batch=whole)


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


def add_model_scores(batch: DataProto, scored: DataProto, *, as_extra_info: bool) -> DataProto:
    """The batch with the reward model's scores, which are in `scored`."""
    if not as_extra_info:
        return batch.union(scored)
    scores = scored.batch["rm_scores"].sum(-1).tolist()
    infos = batch.non_tensor_batch.get("extra_info", [None] * len(batch))
    extras = np.empty(len(batch), dtype=object)
    extras[:] = [
        {**(info or {}), "rm_score": score} for info, score in zip(infos, scores, strict=True)
    ]
    batch.non_tensor_batch["extra_info"] = extras
    return batch


def is_asked_per_response(config: PPOConfig, reward_fn: Any) -> bool:
    """Whether a function of the user's looks at each response, and at the model's score of it."""
    return config.custom_reward_function.path is not None and not isinstance(
        reward_fn, WholeBatchReward
    )


def asks_over_http(config: PPOConfig) -> bool:
    """Whether a function of the user's takes the address of a served reward model."""
    function = get_custom_reward_fn(config) if need_reward_model(config) else None
    if function is None or takes_whole_batch(function)[0]:
        return False
    parameters = inspect.signature(function).parameters
    return "reward_router_address" in parameters


def validates_with_model(config: PPOConfig, batch: DataProto) -> bool:
    """Whether held-out responses go to the model too.

    Where the user's code decides, it is given what training gives it. Otherwise rows with an answer
    are graded by rule, and the model scores those whose `reward_model.style` is `model`.
    """
    manager = config.reward_manager
    is_users_own = manager.source == "importlib" or manager.name != "naive"
    if is_users_own or config.custom_reward_function.path is not None:
        return True
    rows = batch.non_tensor_batch.get("reward_model", [])
    return any(row.get("style") == "model" for row in rows)


def refuse_unsuited_reward_model(config: PPOConfig) -> None:
    """Settings of `reward_model` that are valid and that one process cannot honour."""
    model = config.reward_model
    if isinstance(model, McoreRewardModelConfig) and asks_over_http(config):
        raise ValueError(
            "reward_model.strategy is 'megatron' and custom_reward_function asks the model through "
            "reward_router_address; ranks that divide a model score a batch together: leave that "
            'argument out, the model\'s score is in extra_info["rm_score"]'
        )
    if model.enable_resource_pool and asks_over_http(config):
        raise ValueError(
            "reward_model.enable_resource_pool is True and custom_reward_function asks the model "
            "through reward_router_address; the model is served from the trainer's process only: "
            "set reward_model.enable_resource_pool=False"
        )

"""`AgentLoopManager`: a batch of prompts in, a batch of trajectories out."""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from verl.agent_loop.rollouter import Rollouter, RolloutOptions, rows_of
from verl.agent_loop.server_manager import AsyncLLMServerManager
from verl.agent_loop.sessions import require_working_world
from verl.protocol import DataProto
from verl.protocol.ops import object_array
from verl.protocol.padded import REQUEST_ROW, padded_batch
from verl.protocol.trajectory import Group, Score, Trajectory
from verl.utils.rollout_trace import RolloutTraceConfig
from verl.workers.reward_manager.abstract import graded_rewards
from verl.workers.rollout.base import EngineLostError, Rollout
from verl.workers.rollout.factory import has_own_process
from verl.workers.rollout.fleet import Recover
from verl.workers.rollout.replica import engines_of
from verl.workers.rollout.sequences import SEED_COLUMN, sampling_options

logger = logging.getLogger(__name__)


class AgentLoopManager:
    """Runs agent loops over `rollouts`, or over the engines of a worker group."""

    def __init__(
        self,
        config: Any,
        worker_group: Any = None,
        rollout_resource_pool: Any = None,
        rm_resource_pool: Any = None,
        *,
        rollouts: Sequence[Rollout] | None = None,
        tokenizer: Any = None,
        processor: Any = None,
    ) -> None:
        self.config = config
        self.worker_group = worker_group
        rollout = config.actor_rollout_ref.rollout
        if rollouts is None:
            rollouts = engines_of(worker_group, rollout)
        trace = rollout.trace
        if trace.backend is not None:
            RolloutTraceConfig.init(
                config.trainer.project_name,
                config.trainer.experiment_name,
                trace.backend,
                trace.token2text,
                trace.max_samples_per_step_per_worker,
                Path(config.trainer.default_local_dir).expanduser(),
            )
        self.rollouter = Rollouter(
            config,
            AsyncLLMServerManager(config, rollouts),
            tokenizer=tokenizer,
            processor=processor,
            wake_up=self.wake_up if has_own_process(rollout.name) else None,
        )

    @property
    def rollout_replicas(self) -> list[Rollout]:
        """The engines; they may join and leave."""
        return self.rollouter.servers.server_handles

    @property
    def server_handles(self) -> list[Rollout]:
        return self.rollout_replicas

    def grade_with(self, reward_fn: Any, val_reward_fn: Any) -> None:
        """From now on grade each response as soon as it ends, with a manager that can."""
        self.rollouter.grade_with(reward_fn, val_reward_fn)

    def recover_with(self, recover: Recover) -> None:
        """From now on `recover` restarts a lost engine, with the current weights."""
        self.rollouter.servers = AsyncLLMServerManager(
            self.config, self.rollout_replicas, recover=recover
        )

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Continue every row once; rows of one prompt stand side by side.

        `meta_info` of the result has `timing`, `metrics`, and `policy_version` if all tokens were
        sampled with the same weights. Where every response got a score while they were generated,
        the scores are `rm_scores`, and what graders reported besides are the columns that
        `reward_extra_keys` names. Where loops returned several rows of a session, or none, the
        column `request_row` says which prompt a row continues.
        """
        groups, options = groups_of_rows(prompts), options_of(prompts.meta_info)
        self.rollouter.generate(groups, options)
        return self._as_batch(groups)

    def sampling_params(self, meta_info: Mapping[str, Any]) -> dict[str, Any]:
        """What every loop of a batch samples with."""
        return sampling_options(self.config.actor_rollout_ref.rollout, meta_info)

    def sleep(self) -> None:
        """Let the engines give back the memory that only generation needs."""
        self._tell_engines(lambda rollout: rollout.sleep())

    def wake_up(self) -> None:
        self._tell_engines(lambda rollout: rollout.wake_up())

    def close(self) -> None:
        """End the engines of this process and the polls of others; none is recovered any more."""
        self.rollouter.servers.fleet.close()
        for rollout in self.rollout_replicas:
            rollout.close()

    def _tell_engines(self, tell: Callable[[Rollout], None]) -> None:
        """One that is lost has no memory; it is restarted when it is next needed."""
        for rollout in self.rollout_replicas:
            try:
                tell(rollout)
            except EngineLostError as error:
                logger.warning("a rollout engine is lost: %s", error)

    def _as_batch(self, groups: Sequence[Group]) -> DataProto:
        turns = self.config.actor_rollout_ref.rollout.multi_turn
        require_working_world(groups, turns.max_infra_ratio)
        trajectories = [t for group in groups for t in group.trajectories]
        batch = padded_batch(trajectories, self.rollouter.padding, with_rows=False)
        num_before, places = 0, []
        for group in groups:
            places += [num_before + t.sample for t in group.trajectories]
            num_before += len(group.last_rows) + len(group.lost)
        if places != list(range(num_before)):
            batch.non_tensor_batch[REQUEST_ROW] = np.array(places)
        last_grades = [t.grade for group in groups for t in group.last_rows]
        if all(isinstance(grade, Score) for grade in last_grades):
            grades = [Score(0.0) if t.rows_after else t.grade for t in trajectories]
            rewards = graded_rewards(batch, grades)
            batch.batch["rm_scores"] = rewards["reward_tensor"]
            for name, values in rewards["reward_extra_info"].items():
                batch.non_tensor_batch[name] = object_array(values)
            batch.meta_info["reward_extra_keys"] = list(rewards["reward_extra_info"])
        metrics, seconds = self.rollouter.take_report(groups)
        batch.meta_info |= {"metrics": metrics, "timing": seconds}
        versions = {group.version for group in groups}
        if len(versions) == 1 and None not in versions:
            (batch.meta_info["policy_version"],) = versions
        return batch


def options_of(meta_info: Mapping[str, Any]) -> RolloutOptions:
    return RolloutOptions(
        step=meta_info.get("global_steps", -1),
        is_validation=bool(meta_info.get("validate", False)),
        does_sample=meta_info.get("do_sample"),
    )


def groups_of_rows(prompts: DataProto) -> list[Group]:
    """A trajectory per row; neighbours with the same prompt and loop form a group."""
    groups: list[Group] = []
    last: Any = None
    for place, row in enumerate(rows_of(prompts)):
        seed = row.pop(SEED_COLUMN, None)
        key = row.get("uid"), row.get("raw_prompt"), row.get("agent_name")
        if not groups or key != last:
            uid = str(row.get("uid", place))
            groups.append(Group(index=place, uid=uid, drawn_at=-1))
        last, group = key, groups[-1]
        group.trajectories.append(
            Trajectory(
                uid=group.uid,
                sample=len(group.trajectories),
                row=row,
                seed=None if seed is None else int(seed),
            )
        )
    return groups


async def get_trajectory_info(
    step: int, index: Sequence[Any], validate: bool
) -> list[dict[str, Any]]:
    """Step, dataset row and sample number of each trajectory; samples of a row stand side by side.

    `rollout_n` counts the samples of one row.
    """
    infos: list[dict[str, Any]] = []
    for place, row in enumerate(index):
        is_same_row = place > 0 and index[place - 1] == row
        number = infos[-1]["rollout_n"] + 1 if is_same_row else 0
        infos.append({"step": step, "sample_index": row, "rollout_n": number, "validate": validate})
    return infos

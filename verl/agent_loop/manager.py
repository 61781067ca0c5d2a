"""`AgentLoopManager`: a batch of prompts in, a batch of trajectories out.

Every row gets a loop of its own; all of them run at the same time on one event loop, and the
engines batch what they ask for. Results stand in the order of the rows, whichever finished first.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from verl.agent_loop.base import AgentLoopBase, AgentLoopOutput, DictConfigWrap, agent_loops
from verl.agent_loop.follower import Follower, MakeFollower
from verl.agent_loop.grading import GradedGeneration
from verl.agent_loop.server_manager import AsyncLLMServerManager
from verl.agent_loop.trajectories import as_batch, timing_of
from verl.agent_loop.trajectory_info import trajectory_info
from verl.protocol import DataProto
from verl.utils.dataset.rl_dataset import get_dataset_class
from verl.utils.import_utils import load_class_from_fqn
from verl.utils.rollout_trace import RolloutTraceConfig, rollout_trace_attr
from verl.workers.reward_manager.grading import PerResponseManager
from verl.workers.rollout.base import EngineLostError, Rollout
from verl.workers.rollout.factory import has_own_process
from verl.workers.rollout.fleet import Recover
from verl.workers.rollout.replica import engines_of
from verl.workers.rollout.sequences import SEED_COLUMN, sampling_options

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoopClass:
    """A class and the further arguments its YAML entry gives it."""

    cls: type[AgentLoopBase]
    kwargs: Mapping[str, Any] = field(default_factory=dict)


class AgentLoopManager:
    """Runs agent loops over `rollouts`, or over the engines of a worker group.

    The loops run here, wherever the engines are.
    """

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
        self.tokenizer = tokenizer
        self.processor = processor
        if rollouts is None:
            rollouts = engines_of(worker_group, config.actor_rollout_ref.rollout)
        self.rollout_replicas = list(rollouts)
        self._recover: Recover | None = None
        self._num_restarts_told = 0
        self._dataset_cls = get_dataset_class(config.data)
        trace = config.actor_rollout_ref.rollout.trace
        if trace.backend is not None:
            RolloutTraceConfig.init(
                config.trainer.project_name,
                config.trainer.experiment_name,
                trace.backend,
                trace.token2text,
                trace.max_samples_per_step_per_worker,
            )
        self._loops = listed_loops(config.actor_rollout_ref.rollout.agent.agent_loop_config_path)
        self._ready: set[type[AgentLoopBase]] = set()
        self._reward_fn: Any = None
        self._val_reward_fn: Any = None

    @property
    def server_handles(self) -> list[Rollout]:
        return self.rollout_replicas

    def grade_with(self, reward_fn: Any, val_reward_fn: Any) -> None:
        """From now on grade each response as soon as it ends, with a manager that can."""
        self._reward_fn, self._val_reward_fn = reward_fn, val_reward_fn

    def recover_with(self, recover: Recover) -> None:
        """From now on `recover` starts a lost engine again, with the current weights."""
        self._recover = recover

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Continue every row once. For code that has an event loop there is the async one."""
        return asyncio.run(self.generate_sequences_async(prompts))

    async def generate_sequences_async(self, prompts: DataProto) -> DataProto:
        params = self.sampling_params(prompts.meta_info)
        if self._may_lose_engines:
            self.wake_up()  # others wake by themselves
        versions = self._policy_versions()
        servers = AsyncLLMServerManager(self.config, self.rollout_replicas, recover=self._recover)
        rows = rows_of(prompts.non_tensor_batch)
        make = self._grading_of(prompts.meta_info)
        follower = None if make is None else make(self._as_batch)
        # One task per row, made in row order: samples of a prompt reach the engine together.
        tasks = [
            asyncio.create_task(
                self._run_followed(place, follower, row, dict(params), servers, info)
            )
            for place, (row, info) in enumerate(zip(rows, self._trace_infos(prompts), strict=True))
        ]
        try:
            outputs = list(await asyncio.gather(*tasks))
        except BaseException:
            if follower is not None:
                follower.cancel()
            raise
        finally:
            for task in tasks:
                task.cancel()
        batch = self._as_batch(outputs)
        num_cut = sum(output.stop_reason == "length" for output in outputs)
        batch.meta_info["timing"] = timing_of(outputs)
        if versions == self._policy_versions() and len(versions) == 1:
            (batch.meta_info["policy_version"],) = versions  # every token was sampled with it
        batch.meta_info["metrics"] = {"rollout/truncated_ratio": num_cut / len(outputs)}
        if self._may_lose_engines:
            batch.meta_info["metrics"] |= self._losses(servers)
        if follower is not None:
            await follower.finish(batch)
        return batch

    def sampling_params(self, meta_info: Mapping[str, Any]) -> dict[str, Any]:
        """What every loop of a batch samples with."""
        return sampling_options(self.config.actor_rollout_ref.rollout, meta_info)

    def sleep(self) -> None:
        """Let the engines give back the memory that only generation needs."""
        self._tell_engines(lambda rollout: rollout.sleep())

    def wake_up(self) -> None:
        self._tell_engines(lambda rollout: rollout.wake_up())

    def _tell_engines(self, tell: Callable[[Rollout], None]) -> None:
        """One that is lost has no memory; it is started again when it is next needed."""
        for rollout in self.rollout_replicas:
            try:
                tell(rollout)
            except EngineLostError as error:
                logger.warning("a rollout engine is lost: %s", error)

    def _policy_versions(self) -> set[int]:
        """Those of all engines; none if one of them is lost."""
        try:
            return {rollout.policy_version for rollout in self.rollout_replicas}
        except EngineLostError:
            return set()

    @property
    def _may_lose_engines(self) -> bool:
        return has_own_process(self.config.actor_rollout_ref.rollout.name)

    def _losses(self, servers: AsyncLLMServerManager) -> dict[str, float]:
        """Engines started again since the last batch, and samples that were asked for twice."""
        num_restarts = sum(rollout.num_restarts for rollout in self.rollout_replicas)
        told, self._num_restarts_told = self._num_restarts_told, num_restarts
        return {
            "rollout/engine_restarts": num_restarts - told,
            "rollout/redispatched": servers.num_redispatched,
        }

    def _trace_infos(self, prompts: DataProto) -> list[dict[str, Any]]:
        """What `rollout_trace_attr` wants to know of each row; beyond the limit none is traced."""
        meta_info, columns = prompts.meta_info, prompts.non_tensor_batch
        step, is_validation = meta_info.get("global_steps", -1), meta_info.get("validate", False)
        index = columns["index"] if "index" in columns else range(len(prompts))
        infos = trajectory_info(step, list(index), bool(is_validation))
        limit = RolloutTraceConfig.get_instance().max_samples_per_step_per_worker
        return [
            {**info, "trace": limit is None or place < limit} for place, info in enumerate(infos)
        ]

    def _grading_of(self, meta_info: Mapping[str, Any]) -> MakeFollower | None:
        """None where responses are graded afterwards."""
        is_validation = bool(meta_info.get("validate", False))
        manager = self._val_reward_fn if is_validation else self._reward_fn
        if not isinstance(manager, PerResponseManager):
            return None
        return partial(GradedGeneration, manager)

    def _as_batch(self, outputs: Sequence[AgentLoopOutput]) -> DataProto:
        return as_batch(
            outputs,
            prompt_length=self.config.actor_rollout_ref.rollout.prompt_length,
            response_length=self.config.actor_rollout_ref.rollout.response_length,
            pad_token_id=self.tokenizer.pad_token_id,
        )

    async def _run_followed(
        self,
        place: int,
        follower: Follower | None,
        row: dict[str, Any],
        params: dict[str, Any],
        servers: AsyncLLMServerManager,
        info: Mapping[str, Any],
    ) -> AgentLoopOutput:
        output = await self._run_traced(row, params, servers, **info)
        if follower is not None:
            await follower.add(place, row, output)
        return output

    async def _run_traced(
        self,
        row: dict[str, Any],
        params: dict[str, Any],
        servers: AsyncLLMServerManager,
        **info: Any,
    ) -> AgentLoopOutput:
        with rollout_trace_attr(name="agent_loop", **info):
            return await self._run_row(row, params, servers)

    async def _run_row(
        self, row: dict[str, Any], params: dict[str, Any], servers: AsyncLLMServerManager
    ) -> AgentLoopOutput:
        if row.get(SEED_COLUMN) is not None:
            params["seed"] = int(row.pop(SEED_COLUMN))
        default = self.config.actor_rollout_ref.rollout.agent.default_agent_loop
        loop = self._make_loop(row.get("agent_name") or default, servers)
        return await loop.run(params, **row)

    def _make_loop(self, name: str, servers: AsyncLLMServerManager) -> AgentLoopBase:
        known = self._loops.get(name) or LoopClass(agent_loops[name])
        if known.cls not in self._ready:
            known.cls.init_class(self.config, self.tokenizer, self.processor, **known.kwargs)
            self._ready.add(known.cls)
        return known.cls(
            trainer_config=DictConfigWrap(self.config),
            server_manager=servers,
            tokenizer=self.tokenizer,
            processor=self.processor,
            dataset_cls=self._dataset_cls,
            dataset_config=DictConfigWrap(self.config.data),
            **known.kwargs,
        )


def rows_of(columns: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    names = list(columns)
    return [dict(zip(names, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def listed_loops(path: str | None) -> dict[str, LoopClass]:
    """The loops of a YAML file: a list of `{name, _target_, ...}`, `_target_` being a class."""
    if path is None:
        return {}
    entries = yaml.safe_load(Path(path).expanduser().read_text())
    loops: dict[str, LoopClass] = {}
    for entry in entries:
        if not isinstance(entry, dict) or not {"name", "_target_"} <= entry.keys():
            raise ValueError(
                f"{path} lists {entry!r}; every agent loop needs a name and a _target_, the full "
                "name of its class"
            )
        kwargs = {key: value for key, value in entry.items() if key not in ("name", "_target_")}
        loops[entry["name"]] = LoopClass(
            load_class_from_fqn(entry["_target_"], "agent loop"), kwargs
        )
    return loops

"""Scoring as a service of its own, for programs that call it themselves.

`RewardLoopWorker` scores one response at a time, `RewardLoopManager` a batch; both are made from a
configuration alone. A trainer does not need them: its agent loops grade responses as they end.
"""

import asyncio
from typing import Any

import numpy as np

from verl.protocol import DataProto
from verl.trainer.ppo.reward import RewardFunction, compute_reward, load_reward_manager
from verl.utils.fs import copy_to_local
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.reward_manager.adapters import GradingManager, RewardManagerBase


class RewardLoopWorker:
    """Scores with the reward manager that the configuration names.

    `reward_router_address` is where a served reward model answers; a custom reward function gets it
    as a keyword argument.
    """

    def __init__(self, config: Any, reward_router_address: str | None = None) -> None:
        self.config = config
        self.reward_router_address = reward_router_address
        self.reward_manager = _manager(config, reward_router_address)

    async def compute_score(self, data: DataProto) -> dict[str, Any]:
        """`reward_score` and `reward_extra_info` of a batch of one response."""
        manager = self.reward_manager
        is_single = isinstance(manager, GradingManager) and manager.scope == "trajectory"
        if not is_single and not isinstance(manager, RewardManagerBase):
            raise ValueError(
                f"reward_manager.name={self.config.reward_manager.name} scores whole batches; a "
                "reward loop asks for one response: use naive, dapo, prime, remote or rate_limited"
            )
        return await manager.run_single(data)

    async def compute_score_batch(self, data: DataProto) -> list[dict[str, Any]]:
        """The same for every row, at the same time."""
        rows = [data[row : row + 1] for row in range(len(data))]
        return list(await asyncio.gather(*(self.compute_score(row) for row in rows)))


class RewardLoopManager:
    """Scores batches with the reward manager that the configuration names."""

    def __init__(self, config: Any, rm_resource_pool: Any = None) -> None:
        self.config = config
        self.reward_manager = _manager(config, None)

    def compute_rm_score(self, data: DataProto) -> DataProto:
        """`rm_scores` (B, T), a column for each thing that was reported, and their names in
        `meta_info["reward_extra_keys"]`. A response that cannot be scored is an error."""
        rewards, extras = compute_reward(data, self.reward_manager)
        columns: dict[str, Any] = {}
        for name, values in extras.items():
            columns[name] = np.empty(len(data), dtype=object)
            columns[name][:] = values
        return DataProto.from_dict(
            tensors={"rm_scores": rewards},
            non_tensors=columns,
            meta_info={"reward_extra_keys": list(extras)},
        )


def _manager(config: Any, reward_router_address: str | None) -> RewardFunction:
    model = config.actor_rollout_ref.model
    served: dict[str, Any] = {}
    if reward_router_address is not None:
        served["reward_router_address"] = reward_router_address
        served["reward_model_tokenizer"] = _tokenizer(config.reward_model.model.path, config)
    return load_reward_manager(
        config,
        _tokenizer(model.tokenizer_path or model.path, config),
        num_examine=0,
        **served,
        **config.reward_model.reward_kwargs,
    )


def _tokenizer(path: str, config: Any) -> Any:
    trusts = config.actor_rollout_ref.model.trust_remote_code
    return hf_tokenizer(copy_to_local(path), trust_remote_code=trusts)

"""How many ranks each role has, and how many of them see different sequences.

A role runs on all devices of the run, or on those that `resource_pool.<role>.devices` lists. Ranks
that share one sequence (sequence, tensor, pipeline or context parallel) count once as a
data-parallel rank.
"""

from typing import Any

from verl.config.actor import McoreActorConfig
from verl.config.base import BaseConfig
from verl.config.critic import McoreCriticConfig
from verl.config.engine import EngineConfig, FSDPEngineConfig, McoreEngineConfig


def world_size(config: Any) -> int:
    """All devices of the run."""
    return config.trainer.nnodes * config.trainer.n_gpus_per_node


def pool_devices(config: Any, role: str) -> list[int] | None:
    """The devices that `resource_pool` gives to a role (`actor_rollout_ref`, `critic`,
    `reward_model`, `rollout`), or None when it gives it none and the role shares all."""
    pools: dict[str, Any] = config.resource_pool
    pool = pools.get(role)
    devices = pool.get("devices") if isinstance(pool, dict) else None
    return devices if isinstance(devices, list) and devices else None


def role_ranks(config: Any, role: str) -> int:
    devices = pool_devices(config, role)
    return world_size(config) if devices is None else len(devices)


def rollout_ranks(config: Any) -> int:
    """Ranks that generate: those of the policy, or with a pool of their own those of the pool."""
    section = config.actor_rollout_ref
    if section.hybrid_engine:
        return role_ranks(config, "actor_rollout_ref")
    devices = pool_devices(config, "rollout")
    return ranks_beside(config) if devices is None else len(devices)


def ranks_beside(config: Any) -> int:
    """Ranks that generate on devices beside those of the trainer."""
    section, is_listed = config.actor_rollout_ref, pool_devices(config, "rollout") is not None
    if section.hybrid_engine or is_listed:
        return 0
    return section.rollout.nnodes * section.rollout.n_gpus_per_node


def engine_of(config: Any, role: str) -> EngineConfig:
    """The section that says how a role's model is spread over its ranks."""
    if role == "critic":
        critic = config.critic
        is_megatron = isinstance(critic, McoreCriticConfig)
        return critic.megatron if is_megatron else critic.model.fsdp_config
    actor = config.actor_rollout_ref.actor
    return actor.megatron if isinstance(actor, McoreActorConfig) else actor.fsdp_config


def ranks_per_sequence(engine: BaseConfig) -> int:
    """Ranks that work on the same sequence."""
    if isinstance(engine, FSDPEngineConfig):
        return engine.ulysses_sequence_parallel_size
    assert isinstance(engine, McoreEngineConfig)
    return (
        engine.tensor_model_parallel_size
        * engine.pipeline_model_parallel_size
        * engine.context_parallel_size
    )


def data_parallel_size(config: Any, role: str = "actor_rollout_ref") -> int:
    """Ranks of a role that see different sequences."""
    return max(1, role_ranks(config, role) // ranks_per_sequence(engine_of(config, role)))

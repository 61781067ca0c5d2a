"""What runs where: the controller, the ranks of each role, and the engines that generate."""

from dataclasses import dataclass
from typing import Any

from verl.config.engine import FSDPEngineConfig
from verl.config.names import needs_critic, needs_reference, uses_lora
from verl.config.ranks import (
    data_parallel_size,
    engine_of,
    pool_devices,
    ranks_per_sequence,
    role_ranks,
    world_size,
)


@dataclass(frozen=True)
class RolePlacement:
    """One role, where it runs and how its model is spread."""

    role: str
    pool: str
    layout: str


@dataclass(frozen=True)
class Placement:
    """The whole run."""

    controller: str
    device: str
    nodes: int
    ranks_per_node: int
    roles: list[RolePlacement]

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


def placement(config: Any) -> Placement:
    roles = [RolePlacement("actor", pool(config, "actor_rollout_ref"), layout(config, "actor"))]
    roles.append(rollout_placement(config))
    if needs_reference(config):
        how = "the actor without its adapters" if uses_lora(config) else "a frozen copy"
        roles.append(RolePlacement("reference", pool(config, "actor_rollout_ref"), how))
    if needs_critic(config):
        roles.append(RolePlacement("critic", pool(config, "critic"), layout(config, "critic")))
    if config.reward_model.enable:
        roles.append(reward_placement(config))
    return Placement(
        controller=controller(config),
        device=config.trainer.device,
        nodes=config.trainer.nnodes,
        ranks_per_node=config.trainer.n_gpus_per_node,
        roles=roles,
    )


def controller(config: Any) -> str:
    """Who starts the workers; `auto` is this process for one device and Ray otherwise."""
    if config.trainer.controller != "auto":
        return config.trainer.controller
    return "local" if world_size(config) == 1 else "ray"


def pool(config: Any, role: str) -> str:
    devices = pool_devices(config, role)
    if devices is None:
        return "all ranks"
    return "devices " + ", ".join(map(str, devices))


def layout(config: Any, role: str) -> str:
    name = "critic" if role == "critic" else "actor_rollout_ref"
    engine, ranks = engine_of(config, name), role_ranks(config, name)
    if not isinstance(engine, FSDPEngineConfig):
        shape = (
            f"tensor {engine.tensor_model_parallel_size} x pipeline "
            f"{engine.pipeline_model_parallel_size} x context {engine.context_parallel_size}"
        )
        return f"megatron, {shape}, {data_parallel_size(config, name)} data-parallel"
    if ranks == 1:
        return "one device, not sharded"
    shards = engine.fsdp_size if engine.fsdp_size > 0 else ranks
    text = f"fsdp over {shards} ranks"
    if shards < ranks:
        text += f", {ranks // shards} copies"
    if ranks_per_sequence(engine) > 1:
        text += f", {ranks_per_sequence(engine)} ranks share a sequence"
    return text


def engine_size(rollout: Any) -> int:
    """Devices of one engine."""
    parts = rollout.tensor_model_parallel_size * rollout.data_parallel_size
    return parts * rollout.pipeline_model_parallel_size


def replicas(config: Any) -> int:
    """Engines that generate side by side."""
    ranks = role_ranks(config, "actor_rollout_ref")
    return max(1, ranks // engine_size(config.actor_rollout_ref.rollout))


def rollout_placement(config: Any) -> RolePlacement:
    rollout = config.actor_rollout_ref.rollout
    count = replicas(config)
    engines = "1 engine" if count == 1 else f"{count} engines"
    text = f"{rollout.name}, {engines}, tensor parallel {rollout.tensor_model_parallel_size}"
    if rollout.name == "native" and role_ranks(config, "actor_rollout_ref") == 1:
        text += ", on the trainer's own weights"
    return RolePlacement("rollout", pool(config, "actor_rollout_ref"), text)


def reward_placement(config: Any) -> RolePlacement:
    model = config.reward_model
    where = pool(config, "reward_model")
    if model.enable_resource_pool:
        where = f"a pool of {model.nnodes} x {model.n_gpus_per_node}"
    return RolePlacement("reward model", where, f"{model.rollout.name}, {model.model.path}")

"""What runs where: the controller, the ranks of each role, and the engines that generate."""

from dataclasses import dataclass
from typing import Any

from verl.config.engine import FSDPEngineConfig
from verl.config.roles import (
    data_parallel_size,
    engine_of,
    is_own_reference,
    needs_critic,
    needs_reference,
    pool_devices,
    ranks_beside,
    ranks_per_sequence,
    role_ranks,
    rollout_ranks,
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
        how = "the actor without its adapters" if is_own_reference(config) else "a frozen copy"
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
    return "local" if world_size(config) + ranks_beside(config) == 1 else "ray"


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
    divided = f"fsdp over {shards} ranks"
    if shards < ranks:
        divided += f", {ranks // shards} copies"
    whole = f"whole on each of {ranks} ranks, the optimizer's state divided"
    either = f"{whole}, if that fits; else {divided}"
    text = {"full": divided, "zero1": whole, "auto": either}[engine.sharding]
    if ranks_per_sequence(engine) > 1:
        text += f", {ranks_per_sequence(engine)} ranks share a sequence"
    return text


def engine_size(rollout: Any) -> int:
    """Devices of one engine."""
    parts = rollout.tensor_model_parallel_size * rollout.data_parallel_size
    return parts * rollout.pipeline_model_parallel_size


def replicas(config: Any) -> int:
    """Engines that generate side by side."""
    ranks = rollout_ranks(config)
    return max(1, ranks // engine_size(config.actor_rollout_ref.rollout))


def rollout_placement(config: Any) -> RolePlacement:
    rollout = config.actor_rollout_ref.rollout
    count = replicas(config)
    engines = "1 engine" if count == 1 else f"{count} engines"
    text = f"{rollout.name}, {engines}, tensor parallel {rollout.tensor_model_parallel_size}"
    if not config.actor_rollout_ref.hybrid_engine:
        return RolePlacement("rollout", rollout_pool(config), f"{text}, weights sent by the actor")
    if rollout.name == "native" and has_whole_weights(config):
        text += ", on the trainer's own weights"
    return RolePlacement("rollout", pool(config, "actor_rollout_ref"), text)


def rollout_pool(config: Any) -> str:
    """Where ranks are that only generate."""
    rollout = config.actor_rollout_ref.rollout
    if ranks_beside(config):
        return f"a pool of {rollout.nnodes} x {rollout.n_gpus_per_node}"
    return pool(config, "rollout")


def has_whole_weights(config: Any) -> bool:
    """Whether every rank is sure to hold the whole model, and an engine is one rank."""
    engine, rollout = engine_of(config, "actor_rollout_ref"), config.actor_rollout_ref.rollout
    is_alone = role_ranks(config, "actor_rollout_ref") == 1
    is_zero1 = isinstance(engine, FSDPEngineConfig) and engine.sharding == "zero1"
    return is_alone or (is_zero1 and rollout.tensor_model_parallel_size == 1)


def reward_placement(config: Any) -> RolePlacement:
    model = config.reward_model
    where = pool(config, "reward_model")
    if model.enable_resource_pool:
        where = f"a pool of {model.nnodes} x {model.n_gpus_per_node}"
    return RolePlacement("reward model", where, f"{model.rollout.name}, {model.model.path}")

"""What a role's section says of the engine that trains it, whichever back-end that is."""

from typing import Any

from verl.config.actor import ActorConfig, McoreActorConfig
from verl.config.critic import CriticConfig, FSDPCriticConfig, McoreCriticConfig
from verl.config.engine import FSDPEngineConfig, McoreEngineConfig
from verl.config.ref import McoreRefConfig, RefConfig
from verl.workers.engine.megatron.layout import Layout

MEGATRON = (McoreActorConfig, McoreCriticConfig, McoreRefConfig)


def engine_section(
    role: ActorConfig | CriticConfig | RefConfig,
) -> FSDPEngineConfig | McoreEngineConfig:
    """How the role's model is spread over ranks."""
    if isinstance(role, MEGATRON):
        return role.megatron
    section: Any = role.model if isinstance(role, FSDPCriticConfig) else role
    return section.fsdp_config


def engine_options(role: Any) -> dict[str, Any]:
    """Arguments of `EngineSpec` of a role that is trained."""
    options: dict[str, Any] = {"engine": engine_section(role), "optimizer": role.optim}
    if isinstance(role, MEGATRON):
        return {**options, "backend": "megatron", "max_grad_norm": role.optim.clip_grad}
    return {
        **options,
        "max_grad_norm": role.grad_clip,
        "probe_micro_batch": role.probe_micro_batch,
    }


def ranks_per_sequence(engine: FSDPEngineConfig | McoreEngineConfig) -> int:
    """Ranks that split the tokens of a micro-batch, each with the budget of one device."""
    if isinstance(engine, McoreEngineConfig):
        return engine.context_parallel_size
    return engine.ulysses_sequence_parallel_size


def share_of_rows(
    engine: FSDPEngineConfig | McoreEngineConfig, rank: int, num_ranks: int
) -> tuple[int, bool]:
    """Which shard of the rows a rank gets, and whether its results are collected."""
    if isinstance(engine, McoreEngineConfig):
        layout = Layout.of(engine, num_ranks)
        return layout.data_rank(rank), layout.leads(rank)
    size = engine.ulysses_sequence_parallel_size
    return rank // size, rank % size == 0

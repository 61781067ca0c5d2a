"""How Megatron divides the ranks of a run, and whether that divides the models.

Checked before a worker starts. A model that is not here to read is checked when it is loaded.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.config.engine import McoreEngineConfig
from verl.config.faults import ConfigError, Fault
from verl.config.reward import McoreRewardModelConfig
from verl.config.roles import (
    engine_of,
    needs_critic,
    needs_reference,
    pool_devices,
    ranks_per_sequence,
    role_ranks,
)

if TYPE_CHECKING:
    from verl.workers.engine.megatron.layout import Layout

ACTOR, REF, CRITIC, REWARD = (
    "actor_rollout_ref.actor",
    "actor_rollout_ref.ref",
    "critic",
    "reward_model",
)


def megatron_layout(config: Any, role: str) -> "Layout":
    """Of a role that Megatron trains; refused where its ranks cannot be divided so."""
    from verl.workers.engine.megatron.layout import Layout  # noqa: PLC0415 - beside engines

    return Layout.of(engine_of(config, role), role_ranks(config, role))


def checked_layout(engine: McoreEngineConfig, ranks: int, model: Any) -> "Layout":
    """Of so many ranks; refused where they, or a model that is here, cannot be divided so."""
    from transformers import AutoConfig  # noqa: PLC0415

    from verl.workers.engine.megatron.layout import Layout, check_layout  # noqa: PLC0415

    layout = Layout.of(engine, ranks)
    folder = Path(model.path).expanduser()
    if (folder / "config.json").is_file():
        text = AutoConfig.from_pretrained(folder, trust_remote_code=model.trust_remote_code)
        check_layout(layout, engine, text)
    return layout


def layout_faults(config: Any) -> Iterator[Fault]:
    """Layouts that divide neither ranks nor models, or differ on the same ranks."""
    roles = list(megatron_roles(config))
    if not roles:
        return  # nothing is imported for other back-ends
    layouts = dict[str, "Layout"]()
    for path, engine, ranks, model in roles:
        if ranks % ranks_per_sequence(engine):
            continue  # validation has named it
        try:
            layouts[path] = checked_layout(engine, ranks, model)
        except ConfigError as error:
            yield from (
                Fault(f"{path}.{fault.text}", (f"{path}.megatron",)) for fault in error.faults
            )
    shared = [REF] + ([CRITIC] if pool_devices(config, "critic") is None else [])
    if (
        pool_devices(config, "reward_model") is None
        and not config.reward_model.enable_resource_pool
    ):
        shared.append(REWARD)
    for path in shared:
        if path in layouts and ACTOR in layouts and layouts[path] != layouts[ACTOR]:
            text = (
                f"{path}.megatron is {layouts[path]}, and {ACTOR}.megatron is {layouts[ACTOR]}; "
                "on the same ranks Megatron has one layout: state the same sizes, or give the "
                f"{path} devices of its own (resource_pool.{path}.devices)"
            )
            yield Fault(text, (f"{path}.megatron",))


def megatron_roles(config: Any) -> Iterator[tuple[str, McoreEngineConfig, int, Any]]:
    """Where the section of each role that runs on Megatron is, it, its ranks and its model."""
    section = config.actor_rollout_ref
    engine = engine_of(config, "actor_rollout_ref")
    if isinstance(engine, McoreEngineConfig):
        ranks = role_ranks(config, "actor_rollout_ref")
        yield ACTOR, engine, ranks, section.model
        if needs_reference(config):
            yield REF, section.ref.megatron, ranks, section.model
    if needs_critic(config):
        engine = engine_of(config, "critic")
        if isinstance(engine, McoreEngineConfig):
            yield CRITIC, engine, role_ranks(config, "critic"), config.critic.model
    reward = config.reward_model
    if reward.enable and isinstance(reward, McoreRewardModelConfig):
        own = reward.nnodes * reward.n_gpus_per_node if reward.enable_resource_pool else None
        yield REWARD, reward.megatron, own or role_ranks(config, REWARD), reward.model

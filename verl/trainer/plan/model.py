"""What a configuration asks of its models that they do not have, as their `config.json` tells.

Ranks refuse the same once they have built the model; here it is said before a worker starts, with
all other faults. A model that is not in a folder here is left to them. transformers is imported
only where a setting asks something that the file alone does not answer.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from verl.config.critic import McoreCriticModelConfig
from verl.config.engine import FSDPEngineConfig
from verl.config.faults import ConfigError, Fault
from verl.config.model import (
    BaseModelConfig,
    HFModelConfig,
    McoreModelConfig,
    mcore_override_config,
)
from verl.config.ppo import PPOConfig
from verl.config.roles import engine_of, has_lora, role_ranks
from verl.config.validate_machine import LATER_NAMES, model_sections
from verl.utils.user_files import BrokenFile, read_json_object

POLICY, CRITIC = "actor_rollout_ref.model", "critic.model"
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
EXPERTS_TARGET = "experts"

Question = tuple[str, Callable[[Any], str | None]]
"""A key, and what is wrong with it given the model's configuration (transformers' object)."""


def model_faults(config: Any) -> Iterator[Fault]:
    for section, path in model_sections(config):
        folder = Path(section.path).expanduser()
        try:
            stated = read_json_object(folder / "config.json")
        except BrokenFile:  # not there, or named by validation
            continue
        overrides, questions = overrides_of(section), list(questions_about(config, section, path))
        if questions or set(overrides) - {*stated, *LATER_NAMES}:
            yield from answers(section, path, overrides, questions)


def overrides_of(section: Any) -> dict[str, Any]:
    """What replaces values of `config.json`."""
    has_parts = isinstance(section, BaseModelConfig | HFModelConfig)
    overrides = section.hf_overrides() if has_parts else section.override_config
    apart = mcore_override_config()  # validation has named them
    return {name: value for name, value in overrides.items() if name not in apart}


def answers(
    section: Any, path: str, overrides: dict[str, Any], questions: list[Question]
) -> Iterator[Fault]:
    from verl.models.loading import BadModel, read_config  # noqa: PLC0415 - imports torch

    folder = str(Path(section.path).expanduser())
    try:
        described = read_config(folder, overrides, section.trust_remote_code)
    except ConfigError as error:
        for fault in error.faults:
            yield Fault(f"{path}.{fault.text}", tuple(f"{path}.{key}" for key in fault.keys))
        return
    except BadModel as error:
        if not section.external_lib:  # which may register what reads it
            yield Fault(str(error), (f"{path}.path",))
        return
    for key, wrong in questions:
        text = wrong(described)
        if text is not None:
            yield Fault(text, (key,))


def questions_about(config: Any, section: Any, path: str) -> Iterator[Question]:
    frozen = f"{path}.override_config.moe_config.freeze_moe_router"
    is_megatrons = isinstance(section, McoreModelConfig | McoreCriticModelConfig)
    experts = section.override_config.get("moe_config") or {}
    if is_megatrons and experts.get("freeze_moe_router"):
        yield frozen, lacks_experts(f"{frozen} is True", "")
    if not isinstance(config, PPOConfig):
        return
    if path == POLICY:
        yield from questions_about_policy(config)
    if path in (POLICY, CRITIC):
        yield from questions_about_ranks(config, path)


def questions_about_policy(config: PPOConfig) -> Iterator[Question]:
    section = config.actor_rollout_ref
    mode, key = section.actor.router_replay.mode, f"{ACTOR}.router_replay.mode"
    if mode != "disabled":
        yield key, lacks_experts(f"{key} is {mode}", " whose routes could be replayed")
    if section.rollout.enable_rollout_routing_replay:
        key = f"{ROLLOUT}.enable_rollout_routing_replay"
        yield key, lacks_experts(f"{key} is True", " whose routes could be recorded")
    if section.actor.freeze_vision_tower:
        yield f"{ACTOR}.freeze_vision_tower", lacks_tower
    targets = section.model.target_modules
    if has_lora(section.model) and EXPERTS_TARGET in named(targets):
        key = f"{POLICY}.target_modules"
        yield key, lacks_experts(f"{key} names {EXPERTS_TARGET!r}", "")
    size = section.rollout.tensor_model_parallel_size
    if section.rollout.name == "native" and size > 1:
        yield heads_question(f"{ROLLOUT}.tensor_model_parallel_size", size)
    size, key = section.rollout.expert_parallel_size, f"{ROLLOUT}.expert_parallel_size"
    if size > 1:
        yield key, lacks_experts(f"{key} is {size}", "")
        yield experts_question(key, size)


def questions_about_ranks(config: PPOConfig, path: str) -> Iterator[Question]:
    """How the model is spread over the ranks that train it; Megatron's layout has a module."""
    role = "critic" if path == CRITIC else "actor_rollout_ref"
    engine = engine_of(config, role)
    if not isinstance(engine, FSDPEngineConfig) or role_ranks(config, role) == 1:
        return
    where = f"{CRITIC}.fsdp_config" if path == CRITIC else f"{ACTOR}.fsdp_config"
    size, key = engine.ulysses_sequence_parallel_size, f"{where}.ulysses_sequence_parallel_size"
    if size > 1:
        yield heads_question(key, size)
        yield key, depends_on_longest
    size, key = engine.expert_parallel_size, f"{where}.expert_parallel_size"
    if size > 1:
        yield key, lacks_experts(f"{key} is {size}", "")
        yield experts_question(key, size)


def named(targets: str | list[str]) -> list[str]:
    return [name.strip() for name in targets.split(",")] if isinstance(targets, str) else targets


def num_experts(described: Any) -> int | None:
    from verl.workers.engine.megatron import layout  # noqa: PLC0415 - beside engines

    return layout.num_experts(described.get_text_config())


def lacks_experts(asked: str, purpose: str) -> Callable[[Any], str | None]:
    def wrong(described: Any) -> str | None:
        if num_experts(described) is not None:
            return None
        return f"{asked}, but {described.model_type} has no experts{purpose}: leave it out"

    return wrong


def lacks_tower(described: Any) -> str | None:
    from verl.models.vision import has_vision  # noqa: PLC0415 - imports torch

    if has_vision(described):
        return None
    key = f"{ACTOR}.freeze_vision_tower"
    return f"{key} is True, but {described.model_type} has no vision tower; leave it out"


def heads_question(key: str, size: int) -> Question:
    from verl.models.attention import heads_per_rank  # noqa: PLC0415 - imports torch

    def wrong(described: Any) -> str | None:
        try:
            heads_per_rank(described.get_text_config().num_attention_heads, size, key)
        except ValueError as error:
            return str(error)
        return None

    return key, wrong


def experts_question(key: str, size: int) -> Question:
    def wrong(described: Any) -> str | None:
        count = num_experts(described)
        if count is None or count % size == 0:
            return None
        return f"{key} ({size}) must divide the {count} experts of {described.model_type}"

    return key, wrong


def depends_on_longest(described: Any) -> str | None:
    from verl.models.ulysses import rope_fault  # noqa: PLC0415 - imports torch

    return rope_fault(described.get_text_config())

"""Is everything here that the configuration names: files, packages, interpreters.

These faults are about this machine, not about the configuration, so a dry run lists them without
refusing: one may plan here for another machine. Nothing heavy is imported to find out.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from verl.config.faults import Fault, nearest_path, shown
from verl.config.ppo import PPOConfig
from verl.config.roles import (
    TRACKERS,
    critic_lora_rank,
    needs_critic,
    rollout_traits,
    uses_lora,
    world_size,
)
from verl.config.sft import SFTConfig, SFTEngineConfig

ROLLOUT = "actor_rollout_ref.rollout"


def machine_faults(config: Any) -> Iterator[Fault]:
    yield from file_faults(config)
    yield from tracker_faults(config)
    if isinstance(config, PPOConfig):
        yield from engine_package_faults(config)
        yield from controller_faults(config)


def file_faults(config: Any) -> Iterator[Fault]:
    for key, value in named_files(config):
        for name in value if isinstance(value, list) else [value]:
            if is_local(name) and not Path(name).expanduser().exists():
                yield absent(key, name)
    for key, name in named_models(config):
        yield from model_faults(key, name)


def model_faults(key: str, name: str) -> Iterator[Fault]:
    """A model that is named by its folder must be there; a hub is asked when it is loaded."""
    if looks_local(name) and not Path(name).expanduser().exists():
        yield absent(key, name)


def absent(key: str, name: str) -> Fault:
    hint = nearest_path(Path(name).expanduser().absolute())
    text = f"{key} is {shown(name)}, which does not exist; {hint}"
    return Fault(text, (key,), is_about_machine=True)


def named_files(config: Any) -> Iterator[tuple[str, Any]]:
    """Each key that names a file the run reads, with its value."""
    if isinstance(config, PPOConfig):
        turns = config.actor_rollout_ref.rollout.multi_turn
        yield f"{ROLLOUT}.multi_turn.tool_config_path", turns.tool_config_path
        yield f"{ROLLOUT}.multi_turn.interaction_config_path", turns.interaction_config_path
        loops = config.actor_rollout_ref.rollout.agent.agent_loop_config_path
        yield f"{ROLLOUT}.agent.agent_loop_config_path", loops
        yield "custom_reward_function.path", config.custom_reward_function.path
        yield "data.sampler.class_path", config.data.sampler.class_path
    if isinstance(config, PPOConfig | SFTConfig | SFTEngineConfig):
        yield "data.train_files", config.data.train_files
        yield "data.val_files", config.data.val_files
        yield "data.custom_cls.path", config.data.custom_cls.path
        yield "trainer.resume_from_path", config.trainer.resume_from_path
    elif "path" in config.data:
        yield "data.path", config.data.path


def named_models(config: Any) -> Iterator[tuple[str, str]]:
    if isinstance(config, PPOConfig):
        yield "actor_rollout_ref.model.path", config.actor_rollout_ref.model.path
        same = config.critic.model.path == config.actor_rollout_ref.model.path
        if needs_critic(config) and not same:
            yield "critic.model.path", config.critic.model.path
        if config.reward_model.enable:
            yield "reward_model.model.path", config.reward_model.model.path
    elif isinstance(config, SFTConfig):
        yield "model.partial_pretrain", config.model.partial_pretrain
    elif "model" in config:
        yield "model.path", config.model.path


def is_local(name: Any) -> bool:
    """Whether a file name is a path here; `hdfs://` and `pkg://` are looked up elsewhere."""
    return isinstance(name, str) and "://" not in name


def looks_local(name: str) -> bool:
    """Whether a model's name is a path rather than a name on a hub (`Qwen/Qwen2.5-7B`)."""
    return name.startswith(("/", "./", "../", "~"))


def engine_package_faults(config: PPOConfig) -> Iterator[Fault]:
    rollout = config.actor_rollout_ref.rollout
    package = rollout_traits(rollout.name).package
    if package is not None and rollout.python is None and find_spec(package) is None:
        text = (
            f'{ROLLOUT}.name is "{rollout.name}", but the package {package} is not installed; '
            f"use {ROLLOUT}.name=native, which needs nothing, or "
            f"{install_hint(rollout.name, package)}, or name an interpreter that has it in "
            f"{ROLLOUT}.python"
        )
        yield Fault(text, (f"{ROLLOUT}.name",), is_about_machine=True)
    if rollout.python is not None and not Path(rollout.python).expanduser().exists():
        text = f"{ROLLOUT}.python is {shown(rollout.python)}, which does not exist"
        yield Fault(text, (f"{ROLLOUT}.python",), is_about_machine=True)
    if config.actor_rollout_ref.actor.strategy == "megatron" and find_spec("megatron") is None:
        key = "actor_rollout_ref.actor.strategy"
        text = f'{key} is "megatron", but megatron-core is not installed; install it or use fsdp'
        yield Fault(text, (key,), is_about_machine=True)
    if (uses_lora(config) or critic_lora_rank(config)) and find_spec("peft") is None:
        key = f"{'actor_rollout_ref' if uses_lora(config) else 'critic'}.model.lora_rank"
        text = f'{key} asks for LoRA, but peft is not installed; pip install "verl[peft]"'
        yield Fault(text, (key,), is_about_machine=True)


def install_hint(engine: str, package: str) -> str:
    return 'pip install "verl[vllm]"' if engine == "vllm" else f"install {package}"


def controller_faults(config: PPOConfig) -> Iterator[Fault]:
    controller = config.trainer.controller
    needs_ray = controller == "ray" or (controller == "auto" and world_size(config) > 1)
    if needs_ray and find_spec("ray") is None:
        way_out = 'pip install "verl[ray]"'
        if config.trainer.nnodes == 1:
            way_out += ", or trainer.controller=local"
        text = (
            f'trainer.controller is "{controller}", which for {world_size(config)} devices means '
            f"Ray, but Ray is not installed; {way_out}"
        )
        yield Fault(text, ("trainer.controller",), is_about_machine=True)


def tracker_faults(config: Any) -> Iterator[Fault]:
    if "trainer" not in config or "logger" not in config.trainer:
        return
    for tracker in config.trainer.logger:
        package = TRACKERS.get(tracker)
        if package is not None and find_spec(package) is None:
            text = (
                f"trainer.logger has {shown(tracker)}, but the package {package} is not installed; "
                f'pip install {package}, or use trainer.logger=["console"]'
            )
            yield Fault(text, ("trainer.logger",), is_about_machine=True)

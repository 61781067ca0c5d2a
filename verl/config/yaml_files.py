"""The YAML files that Hydra composes, written from the dataclasses.

Users compose on these files and swap groups (`engine=megatron`), so which file holds which section
is public: `FILES` lists it. A file that pulls other files in by its `defaults` list states only
what differs from them. The comment above a key is the sentence below its field, which Python throws
away and the parser still sees; a subclass that states a field anew may leave the sentence to its
base class.
"""

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cache, partial
from typing import Any

import yaml

from verl.config.actor import ActorConfig, FSDPActorConfig, McoreActorConfig
from verl.config.algorithm import RolloutCorrectionConfig
from verl.config.base import BaseConfig, is_option
from verl.config.critic import CriticConfig, FSDPCriticConfig, McoreCriticConfig
from verl.config.data import DataConfig
from verl.config.engine import FSDPEngineConfig, McoreEngineConfig, VeOmniEngineConfig
from verl.config.model import HFModelConfig
from verl.config.optimizer import FSDPOptimizerConfig, McoreOptimizerConfig, VeOmniOptimizerConfig
from verl.config.presets import PRESETS, Preset
from verl.config.profiler import ProfilerConfig
from verl.config.ref import FSDPRefConfig, McoreRefConfig, RefConfig
from verl.config.reward import (
    FSDPRewardModelConfig,
    McoreRewardModelConfig,
    RewardManagerConfig,
    RewardModelConfig,
)
from verl.config.rollout import RolloutConfig
from verl.config.schema import ROOTS, default_tree, nested

COMMAND = "python -m verl.config.generate"
HEADER = f"# Written by `{COMMAND}`"
WIDTH = 100
INDENT = "  "
PPO_MOUNTS = {
    "data": "data/legacy_data",
    "actor_rollout_ref.model": "model/hf_model",
    "actor_rollout_ref.rollout": "rollout/rollout",
    "reward_manager": "reward_manager",
    "algorithm.rollout_correction": "algorithm/rollout_correction",
}
FSDP_MOUNTS = {
    "actor_rollout_ref.actor": "actor/dp_actor",
    "actor_rollout_ref.ref": "ref/dp_ref",
    "critic": "critic/dp_critic",
    "reward_model": "reward_model/dp_reward_loop",
}
MEGATRON_MOUNTS = {
    "actor_rollout_ref.actor": "actor/megatron_actor",
    "actor_rollout_ref.ref": "ref/megatron_ref",
    "critic": "critic/megatron_critic",
    "reward_model": "reward_model/megatron_reward_loop",
}
SFT_MOUNTS = {"model": "model/hf_model", "engine": "engine/fsdp", "optim": "optim/fsdp"}
ROOT_MOUNTS = {
    "ppo_trainer": PPO_MOUNTS | FSDP_MOUNTS,
    "ppo_megatron_trainer": PPO_MOUNTS | MEGATRON_MOUNTS,
    "sft_trainer_engine": SFT_MOUNTS,
    "rm_trainer": SFT_MOUNTS,
}
OPTIM_FSDP = {"optim": "optim/fsdp"}
OPTIM_MEGATRON = {"optim": "optim/megatron"}
ENGINE_MEGATRON = {"megatron": "engine/megatron"}


@dataclass(frozen=True)
class File:
    """A section, the file of the same group it extends, and the files mounted inside it."""

    section: Callable[[], BaseConfig]
    extends: str | None = None
    mounts: Mapping[str, str] = field(default_factory=dict)


FILES: dict[str, File] = {
    "optim/fsdp": File(FSDPOptimizerConfig),
    "optim/megatron": File(McoreOptimizerConfig),
    "optim/veomni": File(VeOmniOptimizerConfig),
    "engine/fsdp": File(FSDPEngineConfig),
    "engine/megatron": File(McoreEngineConfig),
    "engine/veomni": File(VeOmniEngineConfig),
    "model/hf_model": File(HFModelConfig),
    "data/legacy_data": File(DataConfig),
    "rollout/rollout": File(RolloutConfig),
    "algorithm/rollout_correction": File(RolloutCorrectionConfig.disabled),
    "reward_manager": File(RewardManagerConfig),
    "profiler/profiler": File(ProfilerConfig),
    "actor/actor": File(partial(ActorConfig, strategy="???")),
    "ref/ref": File(RefConfig),
    "critic/critic": File(partial(CriticConfig, strategy="???")),
    "actor/dp_actor": File(FSDPActorConfig, mounts=OPTIM_FSDP | {"fsdp_config": "engine/fsdp"}),
    "actor/megatron_actor": File(McoreActorConfig, mounts=OPTIM_MEGATRON | ENGINE_MEGATRON),
    "ref/dp_ref": File(FSDPRefConfig, mounts={"fsdp_config": "engine/fsdp"}),
    "ref/megatron_ref": File(McoreRefConfig, mounts=ENGINE_MEGATRON),
    "critic/dp_critic": File(
        FSDPCriticConfig, mounts=OPTIM_FSDP | {"model.fsdp_config": "engine/fsdp"}
    ),
    "critic/megatron_critic": File(McoreCriticConfig, mounts=OPTIM_MEGATRON | ENGINE_MEGATRON),
    "reward_model/reward_model": File(RewardModelConfig),
    "reward_model/dp_reward_model": File(
        FSDPRewardModelConfig,
        extends="reward_model/reward_model",
        mounts={"model.fsdp_config": "engine/fsdp"},
    ),
    "reward_model/megatron_reward_model": File(
        McoreRewardModelConfig, extends="reward_model/reward_model", mounts=ENGINE_MEGATRON
    ),
    "reward_model/dp_reward_loop": File(
        FSDPRewardModelConfig, extends="reward_model/dp_reward_model"
    ),
    "reward_model/megatron_reward_loop": File(
        McoreRewardModelConfig, extends="reward_model/megatron_reward_model"
    ),
    **{name: File(root, mounts=ROOT_MOUNTS.get(name, {})) for name, root in ROOTS.items()},
}


def rendered_files() -> dict[str, str]:
    """The text of every file, by its path below `verl/trainer/config`."""
    files = {f"{name}.yaml": rendered(name, file) for name, file in FILES.items()}
    return files | {f"{name}.yaml": rendered_preset(preset) for name, preset in PRESETS.items()}


def rendered_preset(preset: Preset) -> str:
    """A file that extends another: its `defaults`, and the values that differ."""
    head = f"{HEADER}\n# from PRESETS in verl/config/presets.py; change it there.\n#\n"
    defaults = f"defaults:\n{INDENT}- {preset.base}\n{INDENT}- _self_"
    tree = nested({tuple(key.split(".")): value for key, value in preset.values.items()})
    values = yaml.safe_dump(tree, sort_keys=False)
    return f"{head}{comment(preset.summary, 0)}\n\n{defaults}\n\n{values}"


def rendered(name: str, file: File) -> str:
    section = file.section()
    blocks = [header(type(section))]
    if defaults := defaults_list(name, file):
        blocks.append("\n".join(["defaults:", *defaults]))
    supplied = supplied_tree(file)
    return "\n\n".join([*blocks, *section_blocks(section, supplied)]) + "\n"


def header(cls: type[BaseConfig]) -> str:
    source = cls.__module__.replace(".", "/") + ".py"
    return f"{HEADER}\n# from {cls.__name__} in {source}; change it there.\n#\n" + comment(
        summary(cls), 0
    )


def defaults_list(name: str, file: File) -> list[str]:
    """Hydra's list of the files to compose, this one last."""
    here = name.rpartition("/")[0]
    entries = [file.extends.rpartition("/")[2]] if file.extends else []
    for package, mounted in file.mounts.items():
        group, _, option_name = mounted.rpartition("/")
        up = "../" if here else ""  # relative, so that a group composes in a folder of its own
        entries.append(
            f"{up}{group}@{package}: {option_name}" if group else f"{option_name}@{package}"
        )
    return [f"{INDENT}- {entry}" for entry in [*entries, "_self_"]] if entries else []


def supplied_tree(file: File) -> dict[str, Any]:
    """What the files in the `defaults` list hold together."""
    tree: dict[str, Any] = {}
    if file.extends:
        base = FILES[file.extends]
        tree = merged(supplied_tree(base), default_tree(base.section()))
    for package, mounted in file.mounts.items():
        part = default_tree(FILES[mounted].section())
        for name in reversed(package.split(".")):
            part = {name: part}
        tree = merged(tree, part)
    return tree


def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    both = dict(under)
    for name, value in over.items():
        if isinstance(value, Mapping) and isinstance(both.get(name), Mapping):
            both[name] = merged(both[name], value)
        else:
            both[name] = value
    return both


def section_blocks(
    section: BaseConfig, supplied: Mapping[str, Any], depth: int = 0
) -> Iterator[str]:
    """The options of a section that `supplied` does not hold already, each below its sentence."""
    tree = default_tree(section)
    if "_target_" in tree and tree["_target_"] != supplied.get("_target_"):
        yield f"{INDENT * depth}_target_: {tree['_target_']}"
    documented = sentences(type(section))
    for item in filter(is_option, fields(section)):
        name, value = item.name, vars(section)[item.name]
        if isinstance(value, BaseConfig) and isinstance(tree[name], Mapping):
            below = list(section_blocks(value, supplied.get(name, {}), depth + 1))
            lines = [f"{INDENT * depth}{name}:", *below] if below else []
        elif name in supplied and supplied[name] == tree[name]:
            lines = []
        else:
            lines = [f"{INDENT * depth}{name}:{plain_value(tree[name], depth)}"]
        if lines:
            yield "\n".join([comment(documented[name], depth), *lines])


def plain_value(value: Any, depth: int) -> str:
    """A value as it follows the colon; a filled dict goes below its key."""
    if isinstance(value, dict) and value:
        indent = INDENT * (depth + 1)
        return "".join(
            f"\n{indent}{name}:{plain_value(one, depth + 1)}" for name, one in value.items()
        )
    return f" {inline(value)}"


def inline(value: Any) -> str:
    """A value on one line; an interpolation stays as it is."""
    if isinstance(value, str) and "${" in value:
        return value
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6)
    return text.removesuffix("\n").removesuffix("\n...")


def comment(text: str, depth: int) -> str:
    mark = f"{INDENT * depth}# "
    return textwrap.fill(text, WIDTH, initial_indent=mark, subsequent_indent=mark)


@cache
def sentences(cls: type[BaseConfig]) -> dict[str, str]:
    """The documentation of every field of a section, inherited ones included."""
    found: dict[str, str] = {}
    for ancestor in reversed(cls.__mro__):
        if issubclass(ancestor, BaseConfig) and ancestor is not BaseConfig:
            found |= _classes(ancestor.__module__)[ancestor.__name__]
    return found


def summary(cls: type[BaseConfig]) -> str:
    """What a section is for: the docstring of its class."""
    return " ".join(inspect.cleandoc(cls.__doc__ or "").split())


@cache
def _classes(module: str) -> dict[str, dict[str, str]]:
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: _fields(node) for node in tree.body if isinstance(node, ast.ClassDef)}


def _fields(node: ast.ClassDef) -> dict[str, str]:
    found = {}
    for item, below in zip(node.body, node.body[1:], strict=False):
        if (
            isinstance(item, ast.AnnAssign)
            and isinstance(item.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
            and isinstance(below.value.value, str)
        ):
            found[item.target.id] = " ".join(below.value.value.split())
    return found

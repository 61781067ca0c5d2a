"""The schema of each command: its root section, its variants, all its keys and their defaults.

A key is the dotted path of a field. Below a field that is a plain dict (engine arguments, model
overrides) every key is allowed, because its meaning belongs to somebody else.

The PPO trainer has an FSDP and a Megatron variant, the SFT trainer one for each engine; other
commands have a single one. Defaults are kept as the YAML files hold them, so that a composed
configuration can be compared with them leaf by leaf: what differs is what the user set.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from difflib import SequenceMatcher
from functools import cache, cached_property
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf

from verl.config.base import BaseConfig, is_option
from verl.config.engine import McoreEngineConfig, VeOmniEngineConfig
from verl.config.generation import EvaluationConfig, GenerationConfig
from verl.config.optimizer import McoreOptimizerConfig, VeOmniOptimizerConfig
from verl.config.ppo import PPOConfig, PPOMegatronConfig
from verl.config.presets import PRESETS
from verl.config.rm import RMConfig
from verl.config.sft import SFTConfig, SFTEngineConfig

ROOTS: dict[str, type[BaseConfig]] = {
    "ppo_trainer": PPOConfig,
    "ppo_megatron_trainer": PPOMegatronConfig,
    "sft_trainer": SFTConfig,
    "sft_trainer_engine": SFTEngineConfig,
    "rm_trainer": RMConfig,
    "evaluation": EvaluationConfig,
    "generation": GenerationConfig,
}
FILE_ROOTS = ROOTS | {name: ROOTS[preset.base] for name, preset in PRESETS.items()}
"""The schema of every file that a command may start from."""

Values = dict[tuple[str, ...], Any]


class Keys:
    """The keys of one or several roots (the FSDP and the Megatron variant of a command)."""

    def __init__(self, *roots: Any) -> None:
        self.leaves: set[str] = set()
        self.sections: set[str] = set()
        self.nullable: set[str] = set()
        self.free: set[str] = set()
        for root in roots:
            self._walk(root)

    def _walk(self, section: Any, prefix: str = "") -> None:
        hints = type_hints(type(section))
        for item in filter(is_option, fields(section)):
            path = prefix + item.name
            classes = section_classes(hints[item.name])
            value = vars(section)[item.name]
            nested = [value] if is_dataclass(value) else []
            nested += [cls() for cls in classes if not isinstance(value, cls)]
            if type(None) in union_members(hints[item.name]):
                self.nullable.add(path)
            for child in nested:
                self.sections.add(path)
                self._walk(child, f"{path}.")
            if not classes:
                (self.free if accepts_mapping(hints[item.name]) else self.leaves).add(path)

    def __contains__(self, path: str) -> bool:
        """Whether `path` is an option, a section or its `_target_`, or lies in a free dict."""
        path = path.removesuffix("._target_")
        return self.is_declared(path) or any(path.startswith(f"{free}.") for free in self.free)

    def is_declared(self, path: str) -> bool:
        return path in self.leaves or path in self.sections or path in self.free

    def closest(self, path: str) -> list[str]:
        """The keys that `path` may stand for, the best first; empty when nothing is similar."""
        scores = {key: similarity(path, key) for key in sorted(self.leaves | self.free)}
        best = max(scores.values(), default=0.0)
        if best < 1.2:
            return []
        close = [key for key in scores if scores[key] > best - 0.1]
        return sorted(close, key=lambda key: -scores[key])[:3]


@cache
def type_hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def union_members(hint: Any) -> tuple[Any, ...]:
    """The alternatives that a type hint allows: itself when it is no union."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def section_classes(hint: Any) -> list[type]:
    """The dataclasses that a field's type names; empty for a plain option."""
    return [cls for cls in union_members(hint) if is_dataclass(cls) and isinstance(cls, type)]


def accepts_mapping(hint: Any) -> bool:
    """Whether a plain dict is a value of this type."""
    return any(
        member is Any or (get_origin(member) or member) is dict for member in union_members(hint)
    )


def similarity(query: str, key: str) -> float:
    """From 0 to 3: likeness of the last segment, of the whole path, and of the way to it.

    The third part is the share of the query's leading segments that the key has too, so that
    `actor.lr` finds `actor_rollout_ref.actor.optim.lr` and not `critic.optim.lr`.
    """
    *query_way, query_name = query.split(".")
    *key_way, key_name = key.split(".")
    name = SequenceMatcher(None, query_name, key_name).ratio()
    if len(query_name) > 2 and query_name in key_name:
        name = max(name, 0.8)
    if name < 0.6:
        return 0.0
    kept = sum(any(is_alike(step, part) for part in key_way) for step in query_way)
    way = kept / len(query_way) if query_way else 0.5
    return name + SequenceMatcher(None, query, key).ratio() + way


def is_alike(step: str, part: str) -> bool:
    return step == part or SequenceMatcher(None, step, part).ratio() > 0.8


def walk_leaves(section: BaseConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each option of a loaded configuration with its value, extras included, unlogged."""
    state = vars(section)
    declared = [(item.name, state[item.name]) for item in fields(section)]
    for name, value in [*declared, *state["extras"].items()]:
        if isinstance(value, BaseConfig):
            yield from walk_leaves(value, f"{prefix}{name}.")
        elif name != "_target_":
            yield prefix + name, value


@dataclass(frozen=True)
class Variant:
    """One form of a root: its defaults as a section, and the training back-ends it is for."""

    prototype: BaseConfig
    strategies: tuple[str, ...] = ()

    @cached_property
    def keys(self) -> Keys:
        return Keys(self.prototype)

    @cached_property
    def tree(self) -> DictConfig:
        """The defaults, ready to lay values over; never changed."""
        return OmegaConf.create(default_tree(self.prototype))

    @cached_property
    def defaults(self) -> Values:
        return flattened(default_tree(self.prototype))


@dataclass(frozen=True)
class Family:
    """The variants of one root; the value at `strategy_key` chooses, the first is the usual one."""

    variants: tuple[Variant, ...]
    strategy_key: tuple[str, ...] = ()

    @cached_property
    def keys(self) -> Keys:
        return Keys(*(variant.prototype for variant in self.variants))

    def base_of(self, values: Values) -> Variant:
        """The variant on whose files the values were composed; the usual one for a bare file."""
        if (*self.strategy_key[:-1], "_target_") not in values:
            return self.variants[0]
        return min(self.variants, key=lambda variant: len(differences(values, variant)))

    def chosen_by(self, values: Values, otherwise: Variant) -> Variant:
        if self.strategy_key not in values:
            return otherwise
        strategy = values[self.strategy_key]
        return next((one for one in self.variants if strategy in one.strategies), otherwise)


@cache
def family(root: type[BaseConfig]) -> Family:
    """The forms in which the configuration of a command comes."""
    if issubclass(root, PPOConfig):
        ppo = [
            Variant(PPOConfig(), ("fsdp", "fsdp2", "veomni")),
            Variant(PPOMegatronConfig(), ("megatron",)),
        ]
        usual_first = sorted(ppo, key=lambda variant: type(variant.prototype) is not root)
        return Family(tuple(usual_first), ("actor_rollout_ref", "actor", "strategy"))
    if issubclass(root, SFTEngineConfig) and not issubclass(root, RMConfig):
        megatron = SFTEngineConfig(engine=McoreEngineConfig(), optim=McoreOptimizerConfig())
        veomni = SFTEngineConfig(engine=VeOmniEngineConfig(), optim=VeOmniOptimizerConfig())
        sft = (
            Variant(SFTEngineConfig(), ("fsdp", "fsdp2")),
            Variant(megatron, ("megatron",)),
            Variant(veomni, ("veomni",)),
        )
        return Family(sft, ("engine", "strategy"))
    return Family((Variant(root()),))


def default_tree(section: Any) -> dict[str, Any]:
    """The defaults below a section as its YAML holds them: interpolations are not resolved."""
    tree: dict[str, Any] = {}
    for item in fields(section):
        value = vars(section)[item.name]
        follows = item.metadata.get("yaml")
        if follows is not None:
            tree[item.name] = follows
        elif item.name == "_target_" and value:
            tree[item.name] = value
        elif is_option(item):
            tree[item.name] = default_tree(value) if is_dataclass(value) else value
    return tree


def differences(values: Values, variant: Variant) -> Values:
    """What stands in `values` and is not a default of the variant."""
    defaults = variant.defaults
    return {
        path: value
        for path, value in values.items()
        if path not in defaults or defaults[path] != value
    }


def flattened(tree: Mapping[Any, Any], prefix: tuple[str, ...] = ()) -> Values:
    """Leaves by path; an empty mapping is a leaf."""
    values: Values = {}
    for name, value in tree.items():
        path = (*prefix, str(name))
        if isinstance(value, Mapping) and value:
            values |= flattened(value, path)
        else:
            values[path] = value
    return values


def nested(values: Values) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in values.items():
        node = tree
        for name in path[:-1]:
            if not isinstance(node.get(name), dict):
                node[name] = {}
            node = node[name]
        node[path[-1]] = value
    return tree

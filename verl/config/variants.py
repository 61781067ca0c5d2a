"""The forms in which a command's configuration comes, and their defaults.

The PPO trainer has an FSDP and a Megatron form, the SFT trainer one for each engine; other commands
have a single one. Defaults are kept as the YAML files hold them, so that a composed configuration
can be compared with them leaf by leaf: what differs is what the user set.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, cached_property
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl.config.base import BaseConfig, is_option
from verl.config.engine import McoreEngineConfig, VeOmniEngineConfig
from verl.config.keys import Keys
from verl.config.optimizer import McoreOptimizerConfig, VeOmniOptimizerConfig
from verl.config.ppo import PPOConfig, PPOMegatronConfig
from verl.config.sft import SFTEngineConfig

Values = dict[tuple[str, ...], Any]


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
    if issubclass(root, SFTEngineConfig):
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

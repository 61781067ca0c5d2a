"""From what a user wrote to a typed configuration.

The effective configuration is the schema's defaults plus what the user set; what the user set is
the keys on the command line and the keys in the files whose value differs from the default. So a
file may hold a whole configuration composed by Hydra or three lines without `defaults:`, and both
load the same way. Old keys are translated, unknown keys are refused (or, when the configuration
comes from somebody else's program, kept aside with a notice), interpolations are resolved, types
are converted. Relations between sections are left to `validate`.

A deprecated `<name>_micro_batch_size` counts over all devices: it is divided by the number of
data-parallel ranks and becomes `<name>_micro_batch_size_per_gpu`, unless the user set that too.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl.config.async_plan import async_values
from verl.config.base import BaseConfig
from verl.config.convert import Conversion, to_dict, unknown_text
from verl.config.faults import ConfigError, Fault, nearest_multiples
from verl.config.legacy import modernise
from verl.config.roles import data_parallel_size, is_training, sequence_ranks, world_size
from verl.config.schema import (
    Keys,
    Values,
    Variant,
    differences,
    family,
    flattened,
    nested,
)
from verl.config.validate_parts import number_format_notices

REFERENCE = re.compile(r"\$\{(?:oc\.select:)?([\w.]+)")


@dataclass(frozen=True)
class Loaded:
    """A typed configuration and where it came from."""

    config: Any
    user_set: frozenset[str]
    notices: list[str]
    faults: list[Fault]

    def checked(self) -> Any:
        """The configuration, or a ConfigError with all its faults."""
        if self.faults:
            raise ConfigError(self.faults)
        return self.config


def load_config(
    config: DictConfig | Mapping[str, Any],
    root: type[BaseConfig],
    *,
    overrides: Iterable[str] = (),
    keeps_unknown: bool = False,
) -> Loaded:
    """Make the typed configuration. `overrides` are Hydra's: their keys count as set by the user,
    and those written with `+` may be new. `keeps_unknown` is for programs that are not ours."""
    forms = family(root)
    written = overridden_keys(overrides)
    values = without_empty_sections(flattened(raw(config)), forms.keys)
    base = forms.base_of(values)
    chosen = differences(values, base)
    chosen |= {path: value for path, value in values.items() if ".".join(path) in written}
    variant = forms.chosen_by(chosen, otherwise=base)
    modern = modernise(chosen, variant, forms.keys, decided=written)
    notices, faults = modern.notices, modern.faults
    tree = Tree(variant, modern.values)
    unknown = unknown_paths(modern.values, forms.keys, tree, written)
    if not keeps_unknown:
        faults += [Fault(unknown_text(path, forms.keys), (path,)) for path in unknown]
        unknown = [
            path
            for path in map(".".join, modern.values)
            if path not in forms.keys and path not in unknown and written.get(path)
        ]
    if unknown:
        notices.append("kept, though verl has no such option: " + ", ".join(sorted(unknown)))
    user_set = set_by_user(modern.values, variant, written)
    sizes = sizes_per_gpu(tree.config, user_set, variant.keys)
    meant, said = async_values(tree.config, user_set) if is_training(tree.config) else ({}, [])
    if is_training(tree.config):
        said = [*said, *number_format_notices(tree.config)]
    if sizes.values or meant:
        tree = Tree(variant, modern.values | sizes.values | dict(meant))
    return Loaded(
        config=tree.config,
        user_set=frozenset(user_set),
        notices=notices + sizes.notices + said,
        faults=faults + tree.faults + sizes.faults,
    )


class Tree:
    """The defaults of a variant with `values` laid over them, resolved and converted."""

    def __init__(self, variant: Variant, values: Values) -> None:
        inside = {path: value for path, value in values.items() if is_inside(path, variant)}
        outside = {path: value for path, value in values.items() if path not in inside}
        # A section that follows another is copied when a key of its own is set, so the other first.
        merged = OmegaConf.merge(variant.tree, nested(outside))
        try:
            merged = OmegaConf.merge(merged, nested(inside)) if inside else merged
            resolved = OmegaConf.to_container(merged, resolve=True)
        except OmegaConfBaseException as error:
            key = error.full_key or ""
            raise ConfigError([Fault(f"{key} cannot be resolved: {error.msg}", (key,))]) from error
        assert isinstance(resolved, dict)
        named = {str(key): value for key, value in resolved.items()}
        conversion = Conversion()
        self.config = conversion.section(type(variant.prototype), named)
        self.faults = conversion.faults
        self.undeclared = conversion.unknown


def without_empty_sections(values: Values, keys: Keys) -> Values:
    """A section with nothing below it (all of it commented out) sets nothing."""
    empty = keys.sections - keys.nullable
    return {path: value for path, value in values.items() if value or ".".join(path) not in empty}


def is_inside(path: tuple[str, ...], variant: Variant) -> bool:
    """Whether `path` lies in a section whose default is to follow another one."""
    owners = (variant.defaults.get(path[:end]) for end in range(1, len(path)))
    return any(isinstance(owner, str) and owner.startswith("${") for owner in owners)


def unknown_paths(values: Values, keys: Keys, tree: Tree, written: dict[str, bool]) -> list[str]:
    """Keys that no variant has, that were not added with `+`, and that no other value refers to."""
    texts = [value for value in values.values() if isinstance(value, str)]
    referenced = {name for text in texts for name in REFERENCE.findall(text)}
    added = {key for key, is_added in written.items() if is_added}
    return [
        path
        for path in map(".".join, values)
        if path not in keys
        and any(is_at_or_below(path, undeclared) for undeclared in tree.undeclared)
        and not any(is_at_or_below(path, key) for key in added | referenced)
        and not any(is_at_or_below(name, path) for name in referenced)
    ]


def set_by_user(values: Values, variant: Variant, written: dict[str, bool]) -> set[str]:
    chosen = {".".join(path) for path in differences(values, variant)}
    chosen |= {path for path in map(".".join, values) if path in written}
    return {path for path in chosen if not path.endswith("_target_")}


def overridden_keys(overrides: Iterable[str]) -> dict[str, bool]:
    """The keys of Hydra overrides, and whether each may be one that no file has."""
    keys = {}
    for override in overrides:
        key = override.partition("=")[0]
        keys[key.lstrip("+~")] = key.startswith("+")
    return keys


def raw(config: DictConfig | Mapping[str, Any]) -> Mapping[Any, Any]:
    """The values as plain mappings, with interpolations left as they are."""
    if isinstance(config, BaseConfig):
        return to_dict(config)
    values = config
    if isinstance(config, DictConfig):
        values = OmegaConf.to_container(config, resolve=False)
        assert isinstance(values, dict)
    return {key: value for key, value in values.items() if key != "hydra"}


def is_at_or_below(path: str, ancestor: str) -> bool:
    return path == ancestor or path.startswith(f"{ancestor}.")


@dataclass
class SizesPerGpu:
    """Values to add, under today's keys, and what to say about it."""

    values: dict[tuple[str, ...], int | None] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)


def global_sizes(config: Any, user_set: set[str] | frozenset[str], keys: Keys) -> dict[str, int]:
    """The deprecated sizes that the user set, by key."""
    sizes = {}
    for path in sorted(user_set):
        if path.endswith("micro_batch_size") and f"{path}_per_gpu" in keys:
            value = value_at(config, path)
            if value is not None:
                sizes[path] = value
    return sizes


def sizes_per_gpu(config: Any, user_set: set[str], keys: Keys) -> SizesPerGpu:
    result = SizesPerGpu()
    for path, size in global_sizes(config, user_set, keys).items():
        if f"{path}_per_gpu" in user_set:
            continue
        ranks = ranks_of(config, path)
        if size % ranks:
            text = (
                f"{path} is {size}; it is divided by the {ranks} data-parallel ranks, so it must "
                f"be a multiple of {ranks}: {nearest_multiples(size, of=ranks)}; "
                f"or set {path}_per_gpu"
            )
            result.faults.append(Fault(text, (path,)))
            continue
        result.values[tuple(f"{path}_per_gpu".split("."))] = size // ranks
        result.values[tuple(path.split("."))] = None
        result.notices.append(f"{path} is now {path}_per_gpu={size // ranks}")
    return result


def ranks_of(config: Any, path: str) -> int:
    if "actor_rollout_ref" not in config:
        return max(1, world_size(config) // sequence_ranks(config))
    return data_parallel_size(
        config, "critic" if path.startswith("critic.") else "actor_rollout_ref"
    )


def value_at(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = config[name]
    return config

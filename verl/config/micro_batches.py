"""Micro-batch sizes that older scripts count over all devices.

Next to every `<name>_micro_batch_size_per_gpu` stands a deprecated `<name>_micro_batch_size`, which
is divided by the number of data-parallel ranks. A size per GPU that is only a default gives way to
it silently; both set by the user is left for `validate` to refuse.
"""

from dataclasses import dataclass, field
from typing import Any

from verl.config.faults import Fault, nearest_multiples
from verl.config.keys import Keys
from verl.config.roles import data_parallel_size, world_size


@dataclass
class SizesPerGpu:
    """Values to add, under today's keys, and what to say about it."""

    values: dict[tuple[str, ...], int] = field(default_factory=dict)
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
        result.notices.append(f"{path} is now {path}_per_gpu={size // ranks}")
    return result


def ranks_of(config: Any, path: str) -> int:
    if "actor_rollout_ref" not in config:
        return world_size(config)
    return data_parallel_size(
        config, "critic" if path.startswith("critic.") else "actor_rollout_ref"
    )


def value_at(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = config[name]
    return config

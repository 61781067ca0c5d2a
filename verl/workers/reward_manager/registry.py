"""The names of `reward_manager.name` and the classes they stand for.

There is one registry, for whole batches and for responses scored one by one. Built-in managers
are entries "module:attribute", imported when a run names them.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from verl.utils.registry import Registry

Manager = TypeVar("Manager", bound=type)

REWARD_MANAGER_REGISTRY = Registry[type[Any]](
    "reward manager",
    naive="verl.workers.reward_manager.managers:NaiveRewardManager",
    batch="verl.workers.reward_manager.managers:BatchRewardManager",
    dapo="verl.workers.reward_manager.managers:DAPORewardManager",
    prime="verl.workers.reward_manager.prime:PrimeRewardManager",
    rate_limited="verl.workers.reward_manager.managers:RateLimitedRewardManager",
    limited="verl.workers.reward_manager.managers:RateLimitedRewardManager",
    remote="verl.workers.reward_manager.prime:RemoteRewardManager",
    model="verl.workers.reward_manager.managers:ModelRewardManager",
    collabllm="verl.workers.reward_manager.collabllm:CollabRewardManager",
    judge="verl.workers.reward_manager.judge:JudgeRewardManager",
)


def register(name: str) -> Callable[[Manager], Manager]:
    """Class decorator. A second class under the same name is a ValueError."""
    return REWARD_MANAGER_REGISTRY.register(name)


def get_reward_manager_cls(name: str) -> type[Any]:
    """The class behind a name; an unknown name is a ValueError that lists the known ones."""
    if name not in REWARD_MANAGER_REGISTRY:
        known = ", ".join(REWARD_MANAGER_REGISTRY)
        raise ValueError(f"Unknown reward manager: {name}. Known: {known}")
    return REWARD_MANAGER_REGISTRY[name]

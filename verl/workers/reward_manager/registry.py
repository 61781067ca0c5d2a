"""The names of `reward_manager.name` and the classes they stand for.

There is one registry, for whole batches and for responses scored one by one. Built-in managers
are entries "module:attribute", imported when a run names them.
"""

from collections.abc import Callable
from typing import TypeVar

from verl.utils.registry import Registry
from verl.workers.reward_manager.abstract import AbstractRewardManager

Manager = TypeVar("Manager", bound=type)

REWARD_MANAGER_REGISTRY = Registry[type[AbstractRewardManager]](
    "reward manager",
    naive="verl.workers.reward_manager.naive:NaiveRewardManager",
    dapo="verl.workers.reward_manager.dapo:DAPORewardManager",
)


def register(name: str) -> Callable[[Manager], Manager]:
    """Class decorator. A second class under the same name is a ValueError."""
    return REWARD_MANAGER_REGISTRY.register(name)


def get_reward_manager_cls(name: str) -> type[AbstractRewardManager]:
    """The class behind a name; an unknown name is a ValueError that lists the known ones."""
    return REWARD_MANAGER_REGISTRY[name]

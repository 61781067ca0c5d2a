"""Reward managers: they take a batch of responses apart, have each one scored, and put the scores
back on the tokens. `@register("name")` adds one for `reward_manager.name=name`."""

from verl.workers.reward_manager.abstract import AbstractRewardManager
from verl.workers.reward_manager.dapo import DAPORewardManager
from verl.workers.reward_manager.naive import NaiveRewardManager
from verl.workers.reward_manager.registry import (
    REWARD_MANAGER_REGISTRY,
    get_reward_manager_cls,
    register,
)

__all__ = [
    "REWARD_MANAGER_REGISTRY",
    "AbstractRewardManager",
    "DAPORewardManager",
    "NaiveRewardManager",
    "get_reward_manager_cls",
    "register",
]

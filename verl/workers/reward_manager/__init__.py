"""Reward managers: they take a batch of responses apart, have each one scored, and put the scores
back on the tokens. `@register("name")` adds one for `reward_manager.name=name`."""

from verl.workers.reward_manager.abstract import AbstractRewardManager
from verl.workers.reward_manager.managers import (
    BatchRewardManager,
    DAPORewardManager,
    NaiveRewardManager,
    RateLimitedRewardManager,
)
from verl.workers.reward_manager.prime import PrimeRewardManager
from verl.workers.reward_manager.registry import (
    REWARD_MANAGER_REGISTRY,
    get_reward_manager_cls,
    register,
)

__all__ = [
    "REWARD_MANAGER_REGISTRY",
    "AbstractRewardManager",
    "BatchRewardManager",
    "DAPORewardManager",
    "NaiveRewardManager",
    "PrimeRewardManager",
    "RateLimitedRewardManager",
    "get_reward_manager_cls",
    "register",
]

"""The built-in managers in the style of `RewardManagerBase`: made from the configuration and asked
for one response at a time, under the names that `verl.experimental.reward_loop` has."""

from verl.workers.reward_manager import managers, prime
from verl.workers.reward_manager.adapters import (
    RewardManagerBase,
    get_reward_manager_cls,
    loop_style,
)
from verl.workers.reward_manager.registry import register

__all__ = [
    "DAPORewardManager",
    "NaiveRewardManager",
    "RateLimitedRewardManager",
    "RemoteRewardManager",
    "RewardManagerBase",
    "get_reward_manager_cls",
    "register",
]

DAPORewardManager = loop_style(managers.DAPORewardManager)
RateLimitedRewardManager = loop_style(managers.RateLimitedRewardManager)
NaiveRewardManager = loop_style(managers.NaiveRewardManager)
RemoteRewardManager = loop_style(prime.RemoteRewardManager)

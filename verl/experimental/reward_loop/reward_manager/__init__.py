"""Reward managers that are made from the configuration and asked for one response at a time."""

from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase
from verl.experimental.reward_loop.reward_manager.dapo import DAPORewardManager
from verl.experimental.reward_loop.reward_manager.limited import RateLimitedRewardManager
from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager
from verl.experimental.reward_loop.reward_manager.registry import get_reward_manager_cls, register
from verl.experimental.reward_loop.reward_manager.remote import RemoteRewardManager

__all__ = [
    "DAPORewardManager",
    "NaiveRewardManager",
    "RateLimitedRewardManager",
    "RemoteRewardManager",
    "RewardManagerBase",
    "get_reward_manager_cls",
    "register",
]

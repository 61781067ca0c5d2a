"""The one registry of reward managers, whose classes are looked up in the style of this package."""

from verl.workers.reward_manager.adapters import get_reward_manager_cls
from verl.workers.reward_manager.registry import register

__all__ = ["get_reward_manager_cls", "register"]

"""Older import path of `RewardManagerBase`."""

from verl.workers.reward_manager.loop_style import RewardManagerBase

__all__ = ["RewardManagerBase"]

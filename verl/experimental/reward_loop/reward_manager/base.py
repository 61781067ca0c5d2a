"""Older import path of `RewardManagerBase`."""

from verl.workers.reward_manager.adapters import RewardManagerBase

__all__ = ["RewardManagerBase"]

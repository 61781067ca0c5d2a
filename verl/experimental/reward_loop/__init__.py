"""Older import path of `verl.trainer.ppo.reward_loop` and of the served reward model."""

from verl.trainer.ppo.reward_loop import RewardLoopManager, RewardLoopWorker
from verl.workers.reward_model.manager import RewardModelManager

__all__ = ["RewardLoopManager", "RewardLoopWorker", "RewardModelManager"]

"""Older import path of `verl.trainer.ppo.reward` and of the served reward model."""

from verl.trainer.ppo.reward import RewardLoopManager, RewardLoopWorker
from verl.workers.reward_model.server import RewardModelManager

__all__ = ["RewardLoopManager", "RewardLoopWorker", "RewardModelManager"]

"""Old import path of the workers."""

from verl.workers.roles import ActorRolloutRefWorker, CriticWorker, RewardModelWorker

__all__ = ["ActorRolloutRefWorker", "CriticWorker", "RewardModelWorker"]

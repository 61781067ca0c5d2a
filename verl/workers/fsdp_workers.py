"""Old import path of the workers."""

from verl.workers.roles import ActorRolloutRefWorker, CriticWorker, RewardModelWorker

AsyncActorRolloutRefWorker = ActorRolloutRefWorker

__all__ = [
    "ActorRolloutRefWorker",
    "AsyncActorRolloutRefWorker",
    "CriticWorker",
    "RewardModelWorker",
]

"""Old import path of the workers."""

from verl.workers.roles import ActorRolloutRefWorker, CriticWorker

__all__ = ["ActorRolloutRefWorker", "CriticWorker"]

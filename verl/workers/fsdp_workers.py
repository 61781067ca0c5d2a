"""Old import path of the workers."""

from verl.utils.recipe_helpers import create_device_mesh, get_sharding_strategy
from verl.workers.roles import ActorRolloutRefWorker, CriticWorker, RewardModelWorker

AsyncActorRolloutRefWorker = ActorRolloutRefWorker

__all__ = [
    "ActorRolloutRefWorker",
    "AsyncActorRolloutRefWorker",
    "CriticWorker",
    "RewardModelWorker",
    "create_device_mesh",
    "get_sharding_strategy",
]

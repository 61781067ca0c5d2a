"""The workers of a run: one class per role, its methods called through a worker group."""

from verl.workers.roles.actor_rollout_ref import ActorRolloutRefWorker, RolloutWorker
from verl.workers.roles.critic import CriticWorker
from verl.workers.roles.reward_model import RewardModelWorker
from verl.workers.roles.teacher import TeacherWorker
from verl.workers.roles.training import TrainingWorker

__all__ = [
    "ActorRolloutRefWorker",
    "CriticWorker",
    "RewardModelWorker",
    "RolloutWorker",
    "TeacherWorker",
    "TrainingWorker",
]

"""Trainers by mode, with hooks, under the names of newer recipes."""

from verl.agent_loop.llm_server import AgentLoopWorker
from verl.agent_loop.manager import AgentLoopManager
from verl.trainer.ppo.v1.trainers import (
    PPOTrainer,
    PPOTrainerColocateAsync,
    PPOTrainerSeparateAsync,
    PPOTrainerSync,
    get_trainer_cls,
    register_trainer,
)

AgentLoopManagerTQ = AgentLoopManager
"""Whether columns travel through a data plane is the batch's own matter."""

AgentLoopWorkerTQ = AgentLoopWorker

__all__ = [
    "AgentLoopManagerTQ",
    "AgentLoopWorkerTQ",
    "PPOTrainer",
    "PPOTrainerColocateAsync",
    "PPOTrainerSeparateAsync",
    "PPOTrainerSync",
    "get_trainer_cls",
    "register_trainer",
]

"""Trainers by mode, with hooks, under the names of newer recipes."""

from verl.trainer.ppo.v1.trainers import (
    PPOTrainer,
    PPOTrainerColocateAsync,
    PPOTrainerSeparateAsync,
    PPOTrainerSync,
    get_trainer_cls,
    register_trainer,
)

__all__ = [
    "PPOTrainer",
    "PPOTrainerColocateAsync",
    "PPOTrainerSeparateAsync",
    "PPOTrainerSync",
    "get_trainer_cls",
    "register_trainer",
]

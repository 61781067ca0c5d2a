"""The trainer's sections, under the path that `_target_` and users' code name."""

from verl.config.model import BaseModelConfig
from verl.config.profiler import ProfileConfig
from verl.config.reward import ModuleConfig, RewardManagerConfig
from verl.config.trainer import CheckpointConfig

__all__ = [
    "BaseModelConfig",
    "CheckpointConfig",
    "ModuleConfig",
    "ProfileConfig",
    "RewardManagerConfig",
]

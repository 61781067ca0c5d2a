"""The trainer's sections, under the names that `_target_` uses; the YAML files are here too."""

from verl.config.algorithm import (
    AlgoConfig,
    FilterGroupsConfig,
    KLControlConfig,
    RolloutCorrectionConfig,
)
from verl.config.model import BaseModelConfig
from verl.config.profiler import ProfileConfig
from verl.config.reward import ModuleConfig, RewardManagerConfig
from verl.config.trainer import CheckpointConfig

__all__ = [
    "AlgoConfig",
    "BaseModelConfig",
    "CheckpointConfig",
    "FilterGroupsConfig",
    "KLControlConfig",
    "ModuleConfig",
    "ProfileConfig",
    "RewardManagerConfig",
    "RolloutCorrectionConfig",
]

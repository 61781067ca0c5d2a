"""The trainer's sections, under the names that `_target_` uses; the YAML files are here too."""

from verl.trainer.config.algorithm import (
    AlgoConfig,
    FilterGroupsConfig,
    KLControlConfig,
    RolloutCorrectionConfig,
)
from verl.trainer.config.config import (
    BaseModelConfig,
    CheckpointConfig,
    ModuleConfig,
    ProfileConfig,
    RewardManagerConfig,
)

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

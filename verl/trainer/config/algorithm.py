"""The algorithm's sections, under the path that `_target_` and users' code name."""

from verl.config.algorithm import AlgoConfig, FilterGroupsConfig, KLControlConfig
from verl.config.rollout_correction import RolloutCorrectionConfig

__all__ = ["AlgoConfig", "FilterGroupsConfig", "KLControlConfig", "RolloutCorrectionConfig"]

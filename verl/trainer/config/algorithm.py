"""The algorithm's sections, under the path that `_target_` and users' code name."""

from verl.config.algorithm import (
    AlgoConfig,
    FilterGroupsConfig,
    KLControlConfig,
    RolloutCorrectionConfig,
)

__all__ = ["AlgoConfig", "FilterGroupsConfig", "KLControlConfig", "RolloutCorrectionConfig"]

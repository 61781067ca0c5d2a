"""The reward model's sections, under the path that `_target_` and users' code name."""

from verl.config.reward import (
    FSDPRewardModelConfig,
    McoreRewardModelConfig,
    RewardModelConfig,
    SandboxFusionConfig,
)

__all__ = [
    "FSDPRewardModelConfig",
    "McoreRewardModelConfig",
    "RewardModelConfig",
    "SandboxFusionConfig",
]

"""The training back-ends' sections, under the path that `_target_` and users' code name."""

from verl.config.engine import (
    EngineConfig,
    FSDPEngineConfig,
    McoreEngineConfig,
    TrainingWorkerConfig,
    VeOmniEngineConfig,
)

__all__ = [
    "EngineConfig",
    "FSDPEngineConfig",
    "McoreEngineConfig",
    "TrainingWorkerConfig",
    "VeOmniEngineConfig",
]

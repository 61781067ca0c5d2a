"""The rollout's sections, under the path that `_target_` and users' code name."""

from verl.config.rollout import (
    AgentLoopConfig,
    CustomAsyncServerConfig,
    McoreRolloutConfig,
    MultiTurnConfig,
    RolloutConfig,
    TraceConfig,
)
from verl.config.serving import (
    CheckpointEngineConfig,
    PrometheusConfig,
    SamplingConfig,
    ServerConfig,
)

__all__ = [
    "AgentLoopConfig",
    "CheckpointEngineConfig",
    "CustomAsyncServerConfig",
    "McoreRolloutConfig",
    "MultiTurnConfig",
    "PrometheusConfig",
    "RolloutConfig",
    "SamplingConfig",
    "ServerConfig",
    "TraceConfig",
]

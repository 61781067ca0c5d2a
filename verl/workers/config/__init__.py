"""The workers' sections, under the names that `_target_` and users' code use.

They live in `verl.config`; nothing in the package imports them from here. `build_optimizer` brings
torch with it, so it is loaded on first use.
"""

from typing import Any

from verl.config.actor import (
    ActorConfig,
    FSDPActorConfig,
    McoreActorConfig,
    PolicyLossConfig,
    RouterReplayConfig,
)
from verl.config.critic import CriticConfig, FSDPCriticConfig, FSDPCriticModelCfg, McoreCriticConfig
from verl.config.engine import (
    EngineConfig,
    FSDPEngineConfig,
    McoreEngineConfig,
    TrainingWorkerConfig,
    VeOmniEngineConfig,
)
from verl.config.model import HFModelConfig, McoreModelConfig, MtpConfig
from verl.config.optimizer import (
    FSDPOptimizerConfig,
    McoreOptimizerConfig,
    OptimizerConfig,
    VeOmniOptimizerConfig,
)
from verl.config.ref import FSDPRefConfig, McoreRefConfig, RefConfig
from verl.config.reward import (
    FSDPRewardModelConfig,
    McoreRewardModelConfig,
    RewardModelConfig,
    SandboxFusionConfig,
)
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
from verl.utils.import_utils import lazy_attribute

__all__ = [
    "ActorConfig",
    "AgentLoopConfig",
    "CheckpointEngineConfig",
    "CriticConfig",
    "CustomAsyncServerConfig",
    "EngineConfig",
    "FSDPActorConfig",
    "FSDPCriticConfig",
    "FSDPCriticModelCfg",
    "FSDPEngineConfig",
    "FSDPOptimizerConfig",
    "FSDPRefConfig",
    "FSDPRewardModelConfig",
    "HFModelConfig",
    "McoreActorConfig",
    "McoreCriticConfig",
    "McoreEngineConfig",
    "McoreModelConfig",
    "McoreOptimizerConfig",
    "McoreRefConfig",
    "McoreRewardModelConfig",
    "McoreRolloutConfig",
    "MtpConfig",
    "MultiTurnConfig",
    "OptimizerConfig",
    "PolicyLossConfig",
    "PrometheusConfig",
    "RefConfig",
    "RewardModelConfig",
    "RolloutConfig",
    "RouterReplayConfig",
    "SamplingConfig",
    "SandboxFusionConfig",
    "ServerConfig",
    "TraceConfig",
    "TrainingWorkerConfig",
    "VeOmniEngineConfig",
    "VeOmniOptimizerConfig",
]

_LAZY = {"build_optimizer": "verl.workers.engine.optimizer:build_optimizer"}


def __getattr__(name: str) -> Any:
    return lazy_attribute(__name__, _LAZY, name)

"""The actor's sections, under the path that `_target_` and users' code name."""

from verl.config.actor import (
    ActorConfig,
    FSDPActorConfig,
    McoreActorConfig,
    PolicyLossConfig,
    RouterReplayConfig,
)
from verl.config.ref import FSDPRefConfig, McoreRefConfig, RefConfig

__all__ = [
    "ActorConfig",
    "FSDPActorConfig",
    "FSDPRefConfig",
    "McoreActorConfig",
    "McoreRefConfig",
    "PolicyLossConfig",
    "RefConfig",
    "RouterReplayConfig",
]

"""The critic's sections, under the path that `_target_` and users' code name."""

from verl.config.critic import CriticConfig, FSDPCriticConfig, FSDPCriticModelCfg, McoreCriticConfig

__all__ = ["CriticConfig", "FSDPCriticConfig", "FSDPCriticModelCfg", "McoreCriticConfig"]

"""The model's sections, under the path that `_target_` and users' code name."""

from verl.config.model import HFModelConfig, McoreModelConfig, MtpConfig

__all__ = ["HFModelConfig", "McoreModelConfig", "MtpConfig"]

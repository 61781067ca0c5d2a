"""The optimizers' sections, under the path that `_target_` and users' code name.

`build_optimizer` brings torch with it, so it is loaded on first use.
"""

from typing import Any

from verl.config.optimizer import (
    FSDPOptimizerConfig,
    McoreOptimizerConfig,
    OptimizerConfig,
    VeOmniOptimizerConfig,
)
from verl.utils.import_utils import lazy_attribute

__all__ = [
    "FSDPOptimizerConfig",
    "McoreOptimizerConfig",
    "OptimizerConfig",
    "VeOmniOptimizerConfig",
]

LAZY = {"build_optimizer": "verl.workers.engine.optimizer:build_optimizer"}


def __getattr__(name: str) -> Any:
    return lazy_attribute(__name__, LAZY, name)

"""The PPO trainer's import path: credit assignment, and where the roles run."""

from typing import Any

from verl.trainer.ppo.credit import apply_kl_penalty, compute_advantage, compute_response_mask
from verl.utils.import_utils import lazy_attribute

__all__ = ["apply_kl_penalty", "compute_advantage", "compute_response_mask"]

_LAZY = {
    "ResourcePoolManager": "verl.single_controller.ray:ResourcePoolManager",
    "Role": "verl.trainer.ppo.utils:Role",
}


def __getattr__(name: str) -> Any:
    return lazy_attribute(__name__, _LAZY, name)

"""The trainer's usual import path: `RayPPOTrainer`, credit assignment, and where the roles run.

The trainer is the same on every controller; the name is the one that recipes import.
"""

from typing import Any

from verl.trainer.ppo.credit import apply_kl_penalty, compute_advantage, compute_response_mask
from verl.trainer.ppo.trainer import PPOTrainer
from verl.utils.import_utils import lazy_attribute

__all__ = ["RayPPOTrainer", "apply_kl_penalty", "compute_advantage", "compute_response_mask"]

RayPPOTrainer = PPOTrainer

_LAZY = {
    "ResourcePoolManager": "verl.single_controller.ray:ResourcePoolManager",
    "AdvantageEstimator": "verl.algos.registry:AdvantageEstimator",
    "Role": "verl.trainer.ppo.utils:Role",
    "WorkerType": "verl.trainer.ppo.utils:WorkerType",
    "compute_data_metrics": "verl.trainer.ppo.metric_utils:compute_data_metrics",
    "compute_throughout_metrics": "verl.trainer.ppo.metric_utils:compute_throughout_metrics",
    "compute_timing_metrics": "verl.trainer.ppo.metric_utils:compute_timing_metrics",
    "marked_timer": "verl.utils.profiler:marked_timer",
    "pad_dataproto_to_divisor": "verl.protocol:pad_dataproto_to_divisor",
    "reduce_metrics": "verl.utils.metric:reduce_metrics",
    "unpad_dataproto": "verl.protocol:unpad_dataproto",
}


def __getattr__(name: str) -> Any:
    return lazy_attribute(__name__, _LAZY, name)

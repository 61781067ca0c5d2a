"""The metrics of a training step, put together from its batch, its timing and the machine."""

import resource
import sys
from collections.abc import Mapping

from verl.protocol import DataProto
from verl.trainer.ppo.metric_utils import (
    compute_data_metrics,
    compute_throughout_metrics,
    compute_timing_metrics,
    compute_variance_proxy_metrics,
)
from verl.utils.device import peak_memory

GIGABYTE = 1024**3
KILOBYTES_PER_GIGABYTE = 1024**2


def batch_metrics(
    batch: DataProto,
    timing: Mapping[str, float],
    *,
    use_critic: bool,
    num_devices: int,
    grad_norm: float | None,
) -> dict[str, float]:
    """What a step that was made reports about its batch and its time."""
    return {
        **compute_data_metrics(batch, use_critic=use_critic),
        **compute_timing_metrics(batch, timing),
        **compute_throughout_metrics(batch, timing, num_devices),
        **compute_variance_proxy_metrics(batch, grad_norm),
        **memory_metrics(),
    }


def memory_metrics() -> dict[str, float]:
    """The most memory this process has used so far."""
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    per_gigabyte = GIGABYTE if sys.platform == "darwin" else KILOBYTES_PER_GIGABYTE
    metrics = {"perf/cpu_memory_used_gb": used / per_gigabyte}
    peak = peak_memory()
    if peak is not None:
        metrics["perf/max_memory_allocated_gb"] = peak[0] / GIGABYTE
        metrics["perf/max_memory_reserved_gb"] = peak[1] / GIGABYTE
    return metrics


def groups_without_spread(batch: DataProto) -> float:
    """Share of prompts whose responses all have the same score: they teach nothing.

    Where every prompt has one response, the batch as a whole takes the place of a group.
    """
    scores = batch.batch["token_level_scores"].sum(-1).tolist()
    values: dict[str, set[float]] = {}
    for uid, score in zip(batch.non_tensor_batch["uid"], scores, strict=True):
        values.setdefault(uid, set()).add(score)
    if len(values) == len(scores):
        return float(len(set(scores)) == 1)
    return sum(len(distinct) == 1 for distinct in values.values()) / len(values)

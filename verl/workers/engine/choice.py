"""Which engine trains a model: by the number of ranks, and by what one of them can hold."""

import os
from math import prod

import torch
from torch import nn

from verl.config.engine import FSDPEngineConfig
from verl.workers.engine.memory import CudaMemory

STATE_BYTES = 12
"""Of a trained parameter: fp32 master and Adam's two moments."""

MEMORY_SHARE = 0.5
"""Of the device, for weights, gradients and optimizer state. The rest is for activations and for
the cache of a rollout engine beside them."""


def should_divide_weights(
    config: FSDPEngineConfig,
    skeleton: nn.Module,
    *,
    dtype: torch.dtype,
    is_trained: bool,
    num_ranks: int,
    memory_bytes: int,
) -> bool:
    """Whether `sharding` is `full`, or `auto` and one rank cannot hold the whole model."""
    if config.sharding != "auto":
        return config.sharding == "full"
    needed = bytes_per_rank(skeleton, dtype=dtype, is_trained=is_trained, num_ranks=num_ranks)
    return needed > MEMORY_SHARE * memory_bytes


def bytes_per_rank(
    skeleton: nn.Module, *, dtype: torch.dtype, is_trained: bool, num_ranks: int
) -> int:
    """Whole weights, whole gradients and one rank's part of the optimizer's state."""
    weights = [prod(p.shape) for p in skeleton.parameters()]
    trained = [prod(p.shape) for p in skeleton.parameters() if is_trained and p.requires_grad]
    state = STATE_BYTES * sum(trained) // num_ranks
    return dtype.itemsize * (sum(weights) + sum(trained)) + state


def memory_of_rank(device: torch.device, num_ranks: int) -> int:
    """Bytes that one rank may count on; ranks on a CPU share the memory of the machine."""
    if device.type == "cuda":
        return CudaMemory(device).total_bytes
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // num_ranks

"""How much memory keys and values may take."""

import os
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from verl.utils.device import memory_info
from verl.workers.rollout.native.requests import EngineLimits

CONTAINER_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def cache_budget(device: torch.device, share: float) -> int:
    """That share of the device's memory in bytes; on a CPU, of what machine and container allow."""
    if device.type == "cpu":
        return int(share * host_memory())
    return int(share * memory_info(device)[1])


def beside_weights(limits: EngineLimits, module: nn.Module, num_ranks: int = 1) -> EngineLimits:
    """The limits of an engine with weights of its own, which take their part of its memory.
    `num_ranks` divide them."""
    weights = sum(weight.numel() * weight.element_size() for weight in module.parameters())
    taken = weights // num_ranks
    return replace(limits, max_cache_bytes=max(1, limits.max_cache_bytes - taken))


def host_memory() -> int:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in CONTAINER_LIMITS:
        text = path.read_text().strip() if path.is_file() else "max"
        if text != "max":
            memory = min(memory, int(text))
    return memory

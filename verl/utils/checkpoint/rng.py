"""The state of every random number generator of a process, as plain data.

Restoring it makes the next draws of `random`, NumPy, torch on the CPU and on each CUDA device those
that would have come. A device is included once the process has used CUDA: before that nothing was
drawn there, and asking would start it.
"""

import random
from typing import Any

import numpy as np
import torch


def capture_rng() -> dict[str, Any]:
    """Under the keys `random`, `numpy`, `cpu` and, with CUDA in use, `cuda` (one per device)."""
    state: dict[str, Any] = {
        "random": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "cpu": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore_rng(state: dict[str, Any]) -> None:
    """Continue drawing where `capture_rng` was called."""
    random.setstate(state["random"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        _restore_cuda(state["cuda"])


def _restore_cuda(states: list[torch.Tensor]) -> None:
    visible = torch.cuda.device_count()
    if visible != len(states):
        raise ValueError(
            f"the random state of {len(states)} CUDA devices was saved and {visible} are visible; "
            "resume with the same number of devices"
        )
    torch.cuda.set_rng_state_all(states)

"""The state of every random number generator of a process, as plain data.

Restoring it makes the next draws of `random`, NumPy, torch on the CPU and on each accelerator those
that would have come. Accelerators are included once the process has used one: before that nothing
was drawn there, and asking would start them.
"""

import hashlib
import random
from typing import Any

import numpy as np
import torch

from verl.utils.device import DEVICES, get_device_name, rng_states, set_rng_states

ACCELERATORS = {*DEVICES} - {"cpu"}


def capture_rng() -> dict[str, Any]:
    """Under the keys `random`, `numpy`, `cpu` and, with accelerators in use, `cuda` or `npu`."""
    state: dict[str, Any] = {
        "random": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "cpu": torch.get_rng_state(),
    }
    on_devices = rng_states()
    if on_devices:
        state[get_device_name()] = on_devices
    return state


def restore_rng(state: dict[str, Any]) -> None:
    """Continue drawing where `capture_rng` was called."""
    random.setstate(state["random"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["cpu"])
    for kind in ACCELERATORS & state.keys():
        set_rng_states(kind, state[kind])


def reseed_from(state: dict[str, Any], *rank_and_world_size: int) -> None:
    """Draw anew, from a seed that follows from a captured state and the numbers given here.

    For ranks that did not exist when the state was captured: which numbers they draw is determined,
    and no two ranks draw the same.
    """
    digest = hashlib.sha256(state["cpu"].numpy().tobytes())
    digest.update(repr(rank_and_world_size).encode())
    seed = int.from_bytes(digest.digest()[:4], "big")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)

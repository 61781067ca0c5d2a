"""The checkpoint of one role (actor, critic): what goes into it, and the random state of a process.

`BaseCheckpointManager` reads `checkpoint.save_contents` and `load_contents` and keeps count of what
was saved; a subclass writes and reads one folder. Making a step durable and verified is the work of
the owner of all roles of the step: see `store`.

`capture_rng` holds the state of `random`, NumPy, torch on the CPU and on each accelerator that this
process has used (asking an unused one would start it); `restore_rng` continues the same draws.
"""

import hashlib
import random
import time
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from verl.config.trainer import CheckpointConfig
from verl.utils.checkpoint.hf_model import ProcessingClass
from verl.utils.checkpoint.layout import STEP_FORMAT, TRACKER, remove_step
from verl.utils.checkpoint.store import find_intact
from verl.utils.device import DEVICES, get_device_name, rng_states, seed_everything, set_rng_states
from verl.utils.environment import (
    sagemaker_capacity_expiration,
    volcengine_capacity_expiration,
)


class Stateful(Protocol):
    """An optimizer, a schedule, an engine: whatever gives its state and takes it back."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


ACCELERATORS = {*DEVICES} - {"cpu"}


class BaseCheckpointManager:
    """Saves and loads one role. Subclasses implement `save_checkpoint` and `load_checkpoint`."""

    def __init__(
        self,
        model: Any,
        optimizer: Stateful | None,
        lr_scheduler: Stateful | None = None,
        processing_class: ProcessingClass | None = None,
        checkpoint_config: CheckpointConfig | None = None,
    ) -> None:
        self.checkpoint_config = checkpoint_config or CheckpointConfig()
        self.model = model
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.processing_class = processing_class
        self.previous_saved_paths: list[str] = []  # oldest first
        if optimizer is None and (self.should_save_optimizer or self.should_load_optimizer):
            raise ValueError(
                "checkpoint.save_contents and load_contents include 'optimizer', but this role has "
                "none; leave it out of the lists"
            )

    @property
    def should_save_model(self) -> bool:
        return "model" in self.checkpoint_config.save_contents

    @property
    def should_save_optimizer(self) -> bool:
        return "optimizer" in self.checkpoint_config.save_contents

    @property
    def should_save_extra(self) -> bool:
        return "extra" in self.checkpoint_config.save_contents

    @property
    def should_save_hf_model(self) -> bool:
        return "hf_model" in self.checkpoint_config.save_contents

    @property
    def should_load_model(self) -> bool:
        return "model" in self.checkpoint_config.load_contents

    @property
    def should_load_optimizer(self) -> bool:
        return "optimizer" in self.checkpoint_config.load_contents

    @property
    def should_load_extra(self) -> bool:
        return "extra" in self.checkpoint_config.load_contents

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
    ) -> None:
        """Write what `save_contents` names into the folder `local_path`."""
        raise NotImplementedError

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        """Restore what `load_contents` names from the folder `local_path`."""
        raise NotImplementedError

    def register_checkpoint(self, new_path: str, max_ckpt_to_keep: int | None) -> None:
        """Count `new_path`, which must be complete, and delete the oldest beyond the limit."""
        if not Path(new_path).is_dir():
            raise ValueError(f"{new_path} is not there; a checkpoint is registered once complete")
        self.previous_saved_paths = [p for p in self.previous_saved_paths if p != new_path]
        self.previous_saved_paths.append(new_path)
        if max_ckpt_to_keep:  # None and 0 are no limit
            self._keep_newest(max_ckpt_to_keep)

    def ensure_checkpoint_capacity(self, max_ckpt_to_keep: int | None) -> None:
        """Before a save: delete the oldest to make room for one more. The newest always stays."""
        if max_ckpt_to_keep:
            self._keep_newest(max_ckpt_to_keep - 1)

    def _keep_newest(self, count: int) -> None:
        while len(self.previous_saved_paths) > max(count, 1):
            oldest = Path(self.previous_saved_paths.pop(0))
            if oldest.exists():
                remove_step(oldest)

    @staticmethod
    def get_rng_state() -> dict[str, Any]:
        return capture_rng()

    @staticmethod
    def load_rng_state(rng_state: dict[str, Any]) -> None:
        restore_rng(rng_state)


def find_latest_ckpt_path(path: str | None, directory_format: str = STEP_FORMAT) -> str | None:
    """The folder to continue from below `path`, every byte of it verified; None for a new run.

    Raises `NoIntactCheckpointError` when there are checkpoints and none is intact.
    """
    found = find_intact(path, directory_format) if path is not None else None
    return str(found.path) if found else None


def get_checkpoint_tracker_filename(root_path: str) -> str:
    """The file that names the newest committed step."""
    return str(Path(root_path) / TRACKER)


def should_save_ckpt_esi(
    max_steps_duration: float, save_ckpt_duration: float = 60, redundant_time: float = 0
) -> bool:
    """Whether a rented instance ends before another step and a save would be done.

    Volcengine and SageMaker announce the end in the environment; durations are in seconds. On
    Volcengine an end in the past and a step of unknown length (0) do not count.
    """
    needed = max_steps_duration + save_ckpt_duration + redundant_time
    volcengine = volcengine_capacity_expiration()
    if volcengine is not None:
        return max_steps_duration > 0 and 0 < volcengine - time.time() <= needed
    sagemaker = sagemaker_capacity_expiration()
    return sagemaker is not None and sagemaker - time.time() < needed


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
    seed_everything(seed)

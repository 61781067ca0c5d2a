"""The run's checkpoints: a folder per role and the state of the run, committed together.

global_step_N/actor/...   global_step_N/critic/...   global_step_N/data.json
"""

import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from verl.config.convert import to_dict
from verl.config.ppo import PPOConfig
from verl.trainer.ppo.run_state import RunState
from verl.utils.checkpoint.identity import config_identity, dataset_identity, fingerprint
from verl.utils.checkpoint.store import CheckpointStore, steps_to_keep
from verl.utils.checkpoint.tensor_store import load_state, save_state
from verl.utils.dataset.rl_dataset import RLHFDataset

logger = logging.getLogger(__name__)

RUN_STATE = "data"


class RunCheckpoints:
    """Saves and resumes a run. `roles` maps folder names to worker groups."""

    def __init__(self, config: PPOConfig, dataset: Dataset[Any], roles: Mapping[str, Any]) -> None:
        trainer = config.trainer
        self.config = trainer
        self.roles = dict(roles)
        limits = [trainer.max_actor_ckpt_to_keep]
        if "critic" in roles:
            limits.append(trainer.max_critic_ckpt_to_keep)
        self.store = CheckpointStore(
            Path(trainer.default_local_dir).expanduser(),
            fingerprint=fingerprint(
                config=config_identity(to_dict(config)), data=identity_of(dataset)
            ),
            num_to_keep=1 if trainer.remove_previous_ckpt_in_save else steps_to_keep(limits),
        )

    def save(self, state: RunState) -> None:
        """Commit a step. The line that says so is printed only when nothing can undo it."""
        step = state.global_steps
        with self.store.saving(step) as folder:
            for name, group in self.roles.items():
                group.save_checkpoint(str(folder / name), global_step=step)
            save_state(folder, RUN_STATE, state.to_dict())
        sys.stdout.write(f"COMMITTED step={step}\n")
        sys.stdout.flush()

    def resume(self) -> RunState | None:
        """Load the step that `trainer.resume_mode` names into the workers; None for a new run."""
        mode = self.config.resume_mode
        if mode == "disable":
            return None
        found = self.store.resume(self.config.resume_from_path if mode == "resume_path" else None)
        if found is None:
            return None
        for name, group in self.roles.items():
            group.load_checkpoint(str(found.path / name))
        logger.warning("continuing after step %d from %s", found.step, found.path)
        return RunState.from_dict(load_state(found.path, RUN_STATE))


def identity_of(dataset: Dataset[Any]) -> dict[str, Any]:
    files = [file.path for file in dataset.files] if isinstance(dataset, RLHFDataset) else []
    return dataset_identity(files, num_rows=len(dataset))  # pyright: ignore[reportArgumentType]

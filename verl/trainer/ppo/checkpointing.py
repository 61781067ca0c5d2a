"""The run's checkpoints: a folder per role and the state of the run, committed together.

    global_step_N/actor/...   global_step_N/critic/...   global_step_N/data.json

    training                        ranks                         committing
      save ---------------------->    write, leave receipts
           RunState ----------------------------------------->    all receipts are there
                                                                  hash, manifest, rename: COMMITTED

`RunState` and the workers' own checkpoints are all that a run needs to continue as if it had never
stopped; random numbers need nothing, because their seeds follow from the step. With
`checkpoint.async_save` the ranks write, and the step is committed, in threads while training goes
on. A second save waits for the first; what goes wrong is raised by the next call.
"""

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from verl.config.convert import to_dict
from verl.config.ppo import PPOConfig
from verl.config.trainer import TrainerConfig
from verl.single_controller.base.failures import WorkerError
from verl.trainer.common import tracker_locks
from verl.trainer.ppo.regrade import regrade
from verl.trainer.ppo.reward import default_reward_function, has_built_in_scores
from verl.utils.checkpoint.background import (
    COMMIT_TIMEOUT_SECONDS,
    Background,
    collect_receipts,
    upload_step,
)
from verl.utils.checkpoint.layout import LOCK, CheckpointError, step_folder
from verl.utils.checkpoint.manifest import config_identity, dataset_identity, fingerprint
from verl.utils.checkpoint.store import CheckpointStore, steps_to_keep
from verl.utils.checkpoint.tensor_store import (
    EncodedState,
    encode_state,
    load_state,
    write_state,
)
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.reward_score import graders_identity

logger = logging.getLogger(__name__)

RUN_STATE = "data"
FORMAT = 1
"""Of the run's state."""

MAX_REGRADING_SECONDS = 60.0
"""Of stored responses when graders have changed: programs take seconds each."""

GRACE_SECONDS = 20.0
"""How long a run that ends with an error waits for a save: its ranks may be gone."""


@dataclass(kw_only=True)
class RunState:
    """Plain data: everything here can be written as JSON."""

    global_steps: int
    dataloader: dict[str, Any]
    kl_coefficient: float | None = None
    """Of the KL in the reward, which an adaptive controller changes."""

    tripwires: dict[str, Any] = field(default_factory=dict)
    max_steps_duration: float = 0.0
    buffer: dict[str, Any] = field(default_factory=dict)
    """Prompts drawn and updates published so far."""

    format: int = FORMAT

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> "RunState":
        if state.get("format") != FORMAT:
            raise ValueError(
                f"the run's state has format {state.get('format')}; this version reads {FORMAT}"
            )
        return cls(**state)


class RunCheckpoints:
    """Saves and resumes a run. `roles` maps folder names to worker groups, or what stands for one
    with `save_checkpoint`, `load_checkpoint` and `rank_check`."""

    def __init__(self, config: PPOConfig, dataset: Dataset[Any], roles: Mapping[str, Any]) -> None:
        trainer = config.trainer
        self.config = trainer
        self.roles = dict(roles)
        self._grade = default_reward_function(config) if has_built_in_scores(config) else None
        limits = [trainer.max_actor_ckpt_to_keep or None]
        self.is_async = config.actor_rollout_ref.actor.checkpoint.async_save
        if "critic" in roles:
            limits.append(trainer.max_critic_ckpt_to_keep or None)
            self.is_async = self.is_async or config.critic.checkpoint.async_save
        self.store = CheckpointStore(
            Path(trainer.default_local_dir).expanduser(),
            fingerprint=fingerprint(
                config=config_identity(to_dict(config)), data=identity_of(dataset)
            )
            | {"graders": graders_identity()},
            num_to_keep=1 if trainer.remove_previous_ckpt_in_save else steps_to_keep(limits),
            accepted=trainer.resume_may_change,
        )
        self.committed_step: int | None = None  # of this run; None before its first
        self._background = Background("checkpoint-commit")

    def save(self, state: RunState) -> None:
        """Commit a step, or see to it that it will be."""
        self.finish()
        step = state.global_steps
        manner = "in the background" if self.is_async else "now"
        logger.info("checkpoint of step %d: written below %s %s", step, self.store.root, manner)
        with ExitStack() as stack:
            folder = stack.enter_context(self.store.saving(step))
            receipts = self._write_roles(folder, step)
            run_state = encode_state(state.to_dict())
            saving = stack.pop_all()
        if self.is_async:
            self._background.start(lambda: self._commit(saving, folder, step, receipts, run_state))
        else:
            self._commit(saving, folder, step, receipts, run_state)

    def check(self) -> None:
        """Raise what a save in the background ran into, once."""
        self._background.check()

    def finish(self, timeout_seconds: float = COMMIT_TIMEOUT_SECONDS) -> None:
        """Wait for a save in the background, and raise what it ran into."""
        self._background.finish(timeout_seconds)

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """Surrounds a run, which does not end before its last save has.

        After an error the save gets a short time to end too. A second SIGTERM waits for nothing.
        """
        try:
            yield
        except Exception:
            try:
                self.finish(GRACE_SECONDS)
            except (CheckpointError, TimeoutError, WorkerError) as failure:
                logger.error("a save in the background: %s", failure)
            raise
        self.finish()

    def resume(self) -> RunState | None:
        """Load the step that `trainer.resume_mode` names into the workers; None for a new run."""
        mode = self.config.resume_mode
        if mode == "disable":
            return None
        found = self.store.resume(self.config.resume_from_path if mode == "resume_path" else None)
        if found is None:
            return None
        self._report_other_graders(found.manifest.fingerprint)
        for name, group in self.roles.items():
            group.load_checkpoint(str(found.path / name))
        logger.warning("continuing after step %d from %s", found.step, found.path)
        return RunState.from_dict(load_state(found.path, RUN_STATE))

    def _report_other_graders(self, saved: Mapping[str, Any]) -> None:
        """The user has accepted them; the responses that are stored tell what that means."""
        folder = self.config.rollout_data_dir
        has_changed = saved.get("graders", graders_identity()) != graders_identity()
        if folder and has_changed and self._grade is not None:
            again = regrade(folder, max_seconds=MAX_REGRADING_SECONDS, grade=self._grade)
            for source, found in again.items():
                logger.warning(
                    "the graders have changed: of %d stored responses of %s %d have another score "
                    "now, and on %d they failed (python -m verl.trainer.ppo.regrade %s)",
                    *(found.num_graded, source, len(found.flips), len(found.failures), folder),
                )

    def _write_roles(self, folder: Path, step: int) -> list[Path]:
        """Have every rank write; their receipts say when they have."""
        receipts: list[Path] = []
        for name, group in self.roles.items():
            answers = group.save_checkpoint(str(folder / name), global_step=step)
            receipts += [Path(answer) for answer in answers or () if answer is not None]
        return receipts

    def _commit(
        self,
        saving: ExitStack,
        folder: Path,
        step: int,
        receipts: Sequence[Path],
        run_state: EncodedState,
    ) -> None:
        """The line that says so is printed only when nothing can undo it."""
        seconds = COMMIT_TIMEOUT_SECONDS
        with saving:
            groups = self.roles.values()
            checks = [group.rank_check("save_checkpoint", seconds) for group in groups]
            collect_receipts(receipts, seconds, checks)
            write_state(folder, RUN_STATE, run_state)
        self.committed_step = step
        logger.info("checkpoint of step %d: committed", step)
        sys.stdout.write(f"COMMITTED step={step}\n")
        sys.stdout.flush()
        if self.config.default_hdfs_dir is not None:
            upload_step(step_folder(self.store.root, step), self.config.default_hdfs_dir)


def identity_of(dataset: Dataset[Any]) -> dict[str, Any]:
    files = [file.path for file in dataset.files] if isinstance(dataset, RLHFDataset) else []
    return dataset_identity(files, num_rows=len(dataset))  # pyright: ignore[reportArgumentType]


def run_locks(trainer: TrainerConfig) -> dict[str, Path]:
    """What a run locks, so that no other writes its files: a lock per option to change instead."""
    writes_folder = trainer.save_freq > 0 or trainer.board
    folders = {
        "trainer.default_local_dir": trainer.default_local_dir if writes_folder else None,
        "trainer.rollout_data_dir": trainer.rollout_data_dir,
        "trainer.validation_data_dir": trainer.validation_data_dir,
    }
    locks = {option: Path(folder) / LOCK for option, folder in folders.items() if folder}
    return locks | tracker_locks(trainer)

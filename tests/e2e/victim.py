"""A training run in a process of its own that dies on cue.

Children come from a fork server that has imported everything once, so one costs a second or two.
"""

import os
import signal
from pathlib import Path
from typing import Any

import torch

from tests.children import children
from tests.toy import ACTOR, toy_run
from verl.trainer.ppo.trainer import PPOTrainer

STEPS = 6  # two steps an epoch: three epochs
CHANGES = (
    f"trainer.total_training_steps={STEPS}",
    "data.train_max_samples=8",
    "trainer.save_freq=1",
    f"{ACTOR}.ppo_mini_batch_size=2",
    f"{ACTOR}.optim.lr_warmup_steps=3",
    "algorithm.use_kl_in_reward=true",
    "algorithm.kl_ctrl.type=adaptive",
    "algorithm.kl_ctrl.horizon=100",
)
PPO = ("algorithm.adv_estimator=gae",)
STAGES = ("draw_prompts", "rollout", "score", "annotate", "assign_credit", "update", "finish_step")

Cue = tuple[Any, ...]
"""Stage, step, and the signals if it is not SIGKILL. Like a terminal's, SIGINT is for the group."""


def run_child(toy: Path, output: Path, *changes: str, die: Cue | None = None) -> int:
    """Train in a child; its exit code. With `die` it gets a signal on that cue."""
    output.mkdir(exist_ok=True)
    child = children.Process(target=_train, args=(toy, output, changes, die))
    child.start()
    child.join(timeout=100)
    if child.exitcode is None:
        child.kill()
        raise TimeoutError(f"the run in {output} did not end within 100 seconds")
    return child.exitcode


def _train(toy: Path, output: Path, changes: tuple[str, ...], die: Cue | None) -> None:
    os.setpgid(0, 0)
    torch.set_num_threads(1)
    output_file = (output / "output.txt").open("a")
    os.dup2(output_file.fileno(), 1)
    os.dup2(output_file.fileno(), 2)
    trainer_class = PPOTrainer if die is None else dying_trainer(*die)
    toy_run(toy, output, *CHANGES, *changes, trainer_class=trainer_class)


def dying_trainer(stage: str, step: int, *numbers: int) -> type[PPOTrainer]:
    """A trainer that gets a signal when `stage` of `step` has done its work, or amid a save."""

    class Dying(PPOTrainer):
        def init_workers(self) -> None:
            super().init_workers()
            if stage == "save":
                group = self.checkpoint_manager.roles["actor"]
                self.checkpoint_manager.roles["actor"] = _KilledAfterSaving(group, step)

    def killed_after(self: Any, *arguments: Any) -> Any:
        result = getattr(PPOTrainer, stage)(self, *arguments)
        for number in (numbers or (signal.SIGKILL,)) if self.global_steps == step else ():
            os.kill(0 if number == signal.SIGINT else os.getpid(), number)
        return result

    if stage != "save":
        setattr(Dying, stage, killed_after)
    return Dying


class _KilledAfterSaving:
    def __init__(self, group: Any, step: int) -> None:
        self.group, self.step = group, step

    def save_checkpoint(self, path: str, global_step: int) -> None:
        self.group.save_checkpoint(path, global_step=global_step)
        if global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)

    def load_checkpoint(self, path: str) -> None:
        self.group.load_checkpoint(path)

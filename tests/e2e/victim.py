"""A training run in a process of its own that dies on cue.

Children come from a fork server that has imported everything once, so one costs a second or two.
"""

import os
import signal
from pathlib import Path
from typing import Any

import torch

from tests.children import children
from tests.toy import ACTOR, recipe_run, toy_run
from verl.trainer.ppo.trainer import PPOTrainer

STEPS = 6  # two steps an epoch: three epochs
CHANGES = (
    f"trainer.total_training_steps={STEPS}",
    "data.train_max_samples=8",
    "trainer.save_freq=1",
    f"{ACTOR}.ppo_mini_batch_size=2",
    f"{ACTOR}.optim.lr_warmup_steps=3",
)
KL = (
    "algorithm.use_kl_in_reward=true",
    "algorithm.kl_ctrl.type=adaptive",
    "algorithm.kl_ctrl.horizon=100",
)
PPO = ("algorithm.adv_estimator=gae",)
STAGES = ("draw_prompts", "rollout", "score", "annotate", "assign_credit", "update", "finish_step")

Cue = tuple[Any, ...]
"""Stage, step, and the signals if it is not SIGKILL. Like a terminal's, SIGINT is for the group."""


def run_child(
    toy: Path, output: Path, *changes: str, die: Cue | None = None, recipe: str | None = None
) -> int:
    """Train in a child; its exit code. With `die` it gets a signal on that cue."""
    output.mkdir(exist_ok=True)
    child = children.Process(target=_train, args=(toy, output, changes, die, recipe))
    child.start()
    child.join(timeout=200)
    if child.exitcode is None:
        child.kill()
        raise TimeoutError(f"the run in {output} did not end within 200 seconds")
    return child.exitcode


def _train(
    toy: Path, output: Path, changes: tuple[str, ...], die: Cue | None, recipe: str | None
) -> None:
    os.setpgid(0, 0)
    torch.set_num_threads(1)
    output_file = (output / "output.txt").open("a")
    os.dup2(output_file.fileno(), 1)
    os.dup2(output_file.fileno(), 2)

    def cued(trainer_class: type[PPOTrainer]) -> type[PPOTrainer]:
        return trainer_class if die is None else dying_trainer(trainer_class, *die)

    if recipe is None:
        toy_run(toy, output, *CHANGES, *KL, *changes, trainer_class=cued(PPOTrainer))
    else:
        recipe_run(toy, output, recipe, *CHANGES, *changes, cued=cued)


def dying_trainer(base: type[PPOTrainer], stage: str, step: int, *numbers: int) -> type[PPOTrainer]:
    """A trainer that gets a signal when `stage` of `step` has done its work, or amid a save."""

    class Dying(base):
        def init_workers(self) -> None:
            super().init_workers()
            if stage == "save":
                group = self.checkpoint_manager.roles["actor"]
                self.checkpoint_manager.roles["actor"] = _KilledAfterSaving(group, step)

    def killed_after(self: Any, *arguments: Any) -> Any:
        result = getattr(base, stage)(self, *arguments)
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

    def rank_check(self, method: str, timeout_seconds: float) -> Any:
        return self.group.rank_check(method, timeout_seconds)

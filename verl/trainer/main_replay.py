"""Make a step of a run again: `python -m verl.trainer.main_replay <run folder> --step N [--live]`

The run folder is `trainer.default_local_dir`. The step follows from the newest checkpoint before it
(or the first weights), the seeds, and the journal of what tools, users and environments replied; it
comes out bit for bit, and none of them is asked. Steps between the checkpoint and it are made again
too; nothing is written. `--live` asks the world beside, and names the first reply that differs.

Exit codes: 0 the same, 1 something differs, 2 a mistake in the arguments or the folder.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table
from rich.text import Text

from verl.agent_loop.journal import JOURNAL, JOURNAL_CONFIG, Journal, JournalMismatch, Mode
from verl.agent_loop.journal_files import journalled_steps
from verl.config.load import load_config
from verl.config.ppo import PPOConfig
from verl.protocol.trajectory import Group, Score, Trajectory
from verl.trainer.ppo.trainer import PPOTrainer
from verl.trainer.task_runner import TaskRunner
from verl.utils.checkpoint.layout import CheckpointError, list_steps
from verl.utils.py_functional import printable
from verl.utils.user_files import read_json_object

SAME, DIFFERENT, MISTAKE = 0, 1, 2
QUIET = {
    "save_freq": -1,
    "test_freq": -1,
    "val_before_train": False,
    "val_only": False,
    "logger": [],
    "board": False,
    "rollout_data_dir": None,
    "validation_data_dir": None,
    "max_restarts": 0,
    "controller": "local",
}
"""Settings of `trainer` that keep a replay from writing anything; none changes a number."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be made again."""

    folder: Path
    step: int
    mode: Mode = "replay"


class ReplayTrainer(PPOTrainer):
    """Trains up to the step before, from the journal; then makes the trajectories of the step."""

    request: Request

    def _open_journal(self, after: int) -> None:
        self.rollouter.journal = Journal(self.request.folder / JOURNAL, after=after, mode="replay")

    def fit(self) -> None:
        with self.session():
            self._load_checkpoint()
            for step in self.steps():
                if step.step < self.request.step:
                    self.finish_step(self.guarded(self.train_step, step), step)
                    continue
                journal = self.journal
                journal.mode, journal.ended, journal.differences = self.request.mode, {}, []
                self.score(self.rollout(step), step)
                self.groups = step.groups
                return
            raise ValueError(f"the data ended before step {self.request.step}")

    @property
    def journal(self) -> Journal:
        assert self.rollouter.journal is not None
        return self.rollouter.journal


def replayed(request: Request) -> ReplayTrainer:
    """The trainer, which holds the groups of the step."""

    class Runner(TaskRunner):
        trainer_class = type("Replay", (ReplayTrainer,), {"request": request})

    runner = Runner()
    runner.run(replay_config(request))
    assert isinstance(runner.trainer, ReplayTrainer)
    return runner.trainer


def replay_config(request: Request) -> PPOConfig:
    """The configuration of the run, from the newest checkpoint before the step, and quiet."""
    path = request.folder / JOURNAL / JOURNAL_CONFIG
    if not path.exists():
        raise ValueError(
            f"{request.folder} has no {JOURNAL}/{JOURNAL_CONFIG}; name the folder "
            "(trainer.default_local_dir) of a run that saves checkpoints (trainer.save_freq)"
        )
    if request.step < 1:
        raise ValueError(f"--step is {request.step}; steps count from 1")
    saved = list_steps(request.folder)
    newest = max([*saved, *journalled_steps(request.folder / JOURNAL)], default=0)
    if request.step > newest + 1:
        raise ValueError(f"{request.folder} has no step {request.step}; the newest is {newest}")
    values: dict[str, Any] = read_json_object(path)
    values["trainer"] |= {**QUIET, "default_local_dir": str(request.folder)}
    values["data"]["val_files"] = []
    values["actor_rollout_ref"]["rollout"] |= {"prometheus": {}, "trace": {}}
    before = [step for step in saved if step < request.step]
    place = {"resume_mode": "disable", "resume_from_path": None}
    if before:
        place = {"resume_mode": "resume_path", "resume_from_path": str(saved[max(before)])}
    values["trainer"] |= place
    return load_config(OmegaConf.create(values), PPOConfig, keeps_unknown=True).checked()


# ---- what is shown -------------------------------------------------------------------------------


def show(trainer: ReplayTrainer, console: Console, max_shown: int, uid: str | None) -> None:
    """A table of the trajectories of a step, and some of them as conversations."""
    groups = trainer.groups
    table = Table("prompt", "sample", "turns", "tokens", "sampled", "score", "bit-identical")
    for group in groups:
        for one in [*group.trajectories, *group.lost]:
            table.add_row(*map(Text, cells(one, trainer.journal, trainer.request.step)))
    console.print(table)
    chosen = [one for group in groups if uid in (None, group.uid) for one in group.trajectories]
    for one in chosen[:max_shown]:
        console.rule(Text(f"prompt {one.uid}, sample {one.sample}"))
        for segment in one.path():
            text = trainer.tokenizer.decode(segment.token_ids)
            console.print(Text(f"{segment.author}: ", style="bold"), Text(printable(text)))
    if len(chosen) > max_shown:
        console.print(f"{len(chosen) - max_shown} more; --show and --uid choose")


def cells(one: Trajectory, journal: Journal, step: int) -> list[str]:
    verdict = journal.ended.get(f"step {step}, train, prompt {one.uid}, sample {one.sample}")
    mask = one.response_mask if one.segments else []
    score = f"{one.grade.value:.4g}" if isinstance(one.grade, Score) else str(one.grade)
    if one.reward_score is not None:
        score = f"{one.reward_score:.4g}"
    return [
        one.uid,
        str(one.sample),
        str(one.num_turns),
        str(len(mask)),
        str(sum(mask)),
        printable(score, max_characters=60),
        {True: "yes", False: "NO", None: "not journalled"}[verdict],
    ]


def verdict_of(groups: Sequence[Group], journal: Journal) -> int:
    """Say how much of the step came out the same; the exit code."""
    ended = list(journal.ended.values())
    lines = [f"{sum(ended)} of {len(ended)} trajectories are bit-identical"]
    if not ended:
        lines = ["the journal has no trajectory of this step; what is shown follows from the seeds"]
    if journal.differences:
        lines.append(f"{len(journal.differences)} replies differ")
        lines.append(f"first difference: {journal.differences[0]}")
    elif journal.mode == "live":
        lines.append("every reply is what it was")
    sys.stdout.write("".join(printable(line) + "\n" for line in lines))
    return SAME if all(ended) and not journal.differences else DIFFERENT


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    folder, mode = Path(options.folder).expanduser(), "live" if options.live else "replay"
    try:
        trainer = replayed(Request(folder=folder, step=options.step, mode=mode))
        show(trainer, Console(), options.show, options.uid)
        return verdict_of(trainer.groups, trainer.journal)
    except JournalMismatch as error:
        sys.stderr.write(f"differs: {error}\n")
        return DIFFERENT
    except (ValueError, OSError, CheckpointError) as error:
        sys.stderr.write(f"error: {error}\n")
        return MISTAKE


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(
        prog="python -m verl.trainer.main_replay", description=(__doc__ or "").partition("\n")[0]
    )
    root.add_argument("folder", help="trainer.default_local_dir of the run")
    root.add_argument("--step", type=int, required=True, help="the step to make again")
    root.add_argument("--live", action="store_true", help="ask the world beside, and compare")
    root.add_argument("--show", type=int, default=4, help="conversations to print")
    root.add_argument("--uid", help="print conversations of this prompt only, e.g. 12-0")
    return root


if __name__ == "__main__":
    sys.exit(main())

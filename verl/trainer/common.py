"""What all training commands share: seeds by purpose, a progress bar, and signals.

A seed is a hash of its purpose: the run's seed, the step, the prompt, the sample. So two runs draw
the same, a resumed run continues as if it had not stopped, and a sample's tokens do not depend on
which others are generated with it.

The first Ctrl-C or SIGTERM finishes the running step, saves a checkpoint and ends the run normally.
The second ends the process; the last committed checkpoint is intact.
"""

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from verl.utils.environment import is_torchrun
from verl.utils.tracking import metrics_path

DEFAULT_SEED = 1


def tracker_locks(trainer: Any) -> dict[str, Path]:
    """The lock of the file in which a run's metrics are, if it has one."""
    if "file" not in trainer.logger:
        return {}
    file = metrics_path(trainer.project_name, trainer.experiment_name)
    return {
        "trainer.experiment_name or VERL_FILE_LOGGER_PATH": file.with_name(f".{file.name}.lock")
    }


class RunProgress:
    """A bar below the tables of the console tracker; `console` is for tests."""

    def __init__(self, num_steps: int, *, console: Console | None = None) -> None:
        self._num_steps = num_steps
        self._console = console if console is not None else Console()
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left:"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("training", total=num_steps)

    def __enter__(self) -> "RunProgress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, step: int) -> None:
        """`step` steps are done."""
        self._bar.update(self._task, completed=step)


STAGES = (
    "gen", "settle", "sleep", "reward", "old_log_prob", "ref", "values", "teacher", "reward_model",
    "adv", "update_critic", "update_actor", "update_reference", "testing", "save_checkpoint",
)  # fmt: skip


class StageClock:
    """Where the time between the ends of two steps went."""

    def __init__(self) -> None:
        self._ended_at = time.monotonic()

    def shares(self, timing: Mapping[str, float]) -> dict[str, float]:
        """Seconds by stage since the last call; what no stage claims is `other`."""
        before, self._ended_at = self._ended_at, time.monotonic()
        return shares_of_time(timing, self._ended_at - before)


def shares_of_time(timing: Mapping[str, float], wall_seconds: float) -> dict[str, float]:
    """Seconds by stage and the rest; they add up to `wall_seconds`."""
    seconds = {stage: timing[stage] for stage in STAGES if stage in timing}
    excess = sum(seconds.values()) - wall_seconds
    if excess > 0 and "gen" in seconds:  # dynamic sampling grades while it generates
        seconds["gen"] = max(0.0, seconds["gen"] - excess)
    return {**seconds, "other": max(0.0, wall_seconds - sum(seconds.values()))}


class RunSummary:
    """What a run has come to, in a few lines: validation first and last, reward, time, faults."""

    def __init__(self) -> None:
        self._validation: dict[str, list[tuple[int, float]]] = {}
        self._seconds: Counter[str] = Counter()
        self._counts: dict[str, float] = {}
        self._steps: list[int] = []
        self._start = time.monotonic()

    def add(self, step: int, metrics: Mapping[str, Any], seconds: Mapping[str, float]) -> None:
        """Take in what a step reported, and how long its stages took."""
        if step not in self._steps:
            self._steps.append(step)
        for name, value in metrics.items():
            if name.startswith(("val-core/", "critic/score/mean")):
                self._validation.setdefault(name, []).append((step, float(value)))
            elif name.startswith("tripwire/"):
                self._counts[name] = float(value)
        self._seconds.update(seconds)

    def lines(self) -> list[str]:
        """Empty where no step has ended."""
        if not self._steps or not any(self._steps):
            return []
        wall = time.monotonic() - self._start
        first, last = next(step for step in self._steps if step), self._steps[-1]
        lines = [f"steps {first} to {last} in {_clock(wall)}"]
        for name, values in self._validation.items():
            best = max(values, key=lambda entry: entry[1])
            lines.append(
                f"{name}: {values[0][1]:.4g} -> {values[-1][1]:.4g}, "
                f"best {best[1]:.4g} at step {best[0]}"
            )
        total = sum(self._seconds.values())
        shares = [f"{name} {s / total:.0%}" for name, s in self._seconds.most_common() if s > 0]
        lines.append(f"time: {', '.join(shares)}")
        lines += [f"{name}: {count:g} steps" for name, count in self._counts.items() if count]
        return lines

    def show(self, folder: Path, saved_step: int) -> None:
        """Print it, and where the newest checkpoint is; nothing where no step has ended."""
        lines = self.lines()
        if lines and saved_step:
            lines.append(f"checkpoint: {folder / f'global_step_{saved_step}'}")
        if lines:
            Console().print(Text("\n".join(lines)), soft_wrap=True)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


REPEAT_SECONDS = 5.0
"""`torchrun` passes on what a terminal or a scheduler has sent to the ranks already."""


class Termination:
    """Notes SIGINT (Ctrl-C) and SIGTERM while it is entered.

    Only the main thread can listen to signals. Where SIGINT is ignored, as in the background of a
    shell script, it stays so. Without `does_save` the notice says that nothing will be saved.
    """

    def __init__(self, *, does_save: bool = True) -> None:
        self.is_requested = False
        self._noted_at = 0.0
        self._ending = "saving" if does_save else "not saving (trainer.save_freq)"
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Termination":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.is_requested:
            self.is_requested, self._noted_at = True, time.monotonic()
            # Not `print`: the signal may have come in the middle of one.
            name = signal.Signals(number).name
            text = f"{name}: finishing the step, {self._ending}, then ending; again ends at once\n"
            os.write(2, text.encode())
        elif not is_torchrun() or time.monotonic() - self._noted_at > REPEAT_SECONDS:
            raise SystemExit(128 + number)

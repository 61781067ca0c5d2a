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
from pathlib import Path
from types import FrameType, TracebackType
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def show(self, step: int) -> None:
        """`step` steps are done."""
        self._bar.update(self._task, completed=step)


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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
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

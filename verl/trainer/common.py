"""What all training commands share: seeds by purpose, a progress bar, and SIGTERM.

A seed is a hash of its purpose: the run's seed, the step, the prompt, the sample. So two runs draw
the same, a resumed run continues as if it had not stopped, and a sample's tokens do not depend on
which others are generated with it.

The first SIGTERM finishes the running step, saves a checkpoint and ends the run normally. The
second ends the process; the last committed checkpoint is intact.
"""

import hashlib
import signal
import threading
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

DEFAULT_SEED = 1


def keyed_seed(*key: int | str) -> int:
    """63 bits that belong to `key` alone."""
    text = "\x1f".join(map(repr, key))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


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


EXIT_AT_ONCE = 128 + signal.SIGTERM


class Termination:
    """Notes the request while it is entered; only the main thread can listen to signals."""

    def __init__(self) -> None:
        self.is_requested = False
        self._before: Any = None

    def __enter__(self) -> "Termination":
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.is_requested:
            raise SystemExit(EXIT_AT_ONCE)
        self.is_requested = True

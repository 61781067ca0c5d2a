"""How far the run is and how long it will take, for a person at a terminal; otherwise nothing."""

from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


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

"""SIGTERM asks a run to save and stop; a second one stops it at once.

first   the step that runs is finished, a checkpoint is saved, the run ends normally
second  the process ends; the last committed checkpoint is intact, as always
"""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

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

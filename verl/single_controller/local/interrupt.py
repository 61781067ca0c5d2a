"""A deadline for code that runs in this very process.

    calling thread                      timer thread
      run the function                    sleeps until the deadline
        |  <------- SIGVTALRM ---------   notes the stack, wakes the main thread
      DeadlinePassed is raised inside the function

A signal interrupts what Python can be interrupted in: sleeping, locks, sockets, Python code; a long
C call ends first. Only the main thread can be interrupted; on another thread the deadline is
noticed when the function returns. SIGVTALRM is used because user code (graders, schedulers) uses
the others.
"""

import signal
import sys
import threading
import traceback
from types import FrameType


class DeadlinePassed(BaseException):
    """Raised inside the function; not an `Exception`, so that its own handlers let it pass."""

    def __init__(self, watch: "Watch") -> None:
        super().__init__()
        self.watch = watch


class Watch:
    """One running function; those of the main thread can be nested.

    try:
        try:
            watch.start()
            function()
        finally:
            watch.stop()
    except DeadlinePassed as passed:
        watch.stop()  # the signal may have come in the middle of the first stop
        if passed.watch is not watch:
            raise
    watch.stack  # where the function was at its deadline; None if it was in time
    """

    active: "list[Watch]" = []  # outermost first

    def __init__(self, seconds: float) -> None:
        self.stack: str | None = None
        self.has_raised = False
        self._thread = threading.current_thread()
        self._timer = threading.Timer(max(seconds, 0.0), self._expire)
        self._timer.daemon = True

    def start(self) -> None:
        if self._is_on_main_thread():
            Watch.active.append(self)
            # It stays installed: a signal that comes late finds no watch and does nothing.
            signal.signal(signal.SIGVTALRM, _raise_in_main_thread)
        self._timer.start()

    def stop(self) -> None:
        self._timer.cancel()
        if self in Watch.active:
            Watch.active.remove(self)

    def _is_on_main_thread(self) -> bool:
        return self._thread is threading.main_thread()

    def _expire(self) -> None:
        ident = self._thread.ident or 0
        frame = sys._current_frames().get(ident)
        self.stack = "".join(traceback.format_stack(frame)).rstrip()
        if self._is_on_main_thread():
            signal.pthread_kill(ident, signal.SIGVTALRM)


def _raise_in_main_thread(number: int, frame: FrameType | None) -> None:
    for watch in Watch.active:
        if watch.stack is not None and not watch.has_raised:
            watch.has_raised = True
            raise DeadlinePassed(watch)

"""Signs of life from the engine's process, and its end when nobody needs it any more.

A thread of its own sends beats, so a long step is not taken for silence; a stopped or frozen
process is silent. Each beat says for how long the main thread has been at its present work, so that
a deadlock shows too. The same thread watches for the end of the process that started this one and
then kills this one's whole group: the line alone does not tell, since a fork of that process may
hold its end open.
"""

import os
import shutil
import signal
import threading
import time

from verl.workers.rollout.process.wire import Wire, WireClosedError, encode


class Pulse:
    """The thread; `came_round` is called by the main one whenever it has got on."""

    def __init__(self, wire: Wire, *, parent: int, beat_seconds: float, folder: str) -> None:
        self._wire = wire
        self._folder = folder  # the parent removes it, if it can
        self._parent = parent
        self._beat_seconds = beat_seconds
        self._last_round = time.monotonic()

    def start(self) -> None:
        threading.Thread(target=self._beat, name="pulse", daemon=True).start()

    def came_round(self) -> None:
        self._last_round = time.monotonic()

    def _beat(self) -> None:
        while os.getppid() == self._parent and not self._wire.has_hung_up(self._beat_seconds):
            try:
                self._wire.send_if_free(encode({"beat": time.monotonic() - self._last_round}))
            except WireClosedError:
                break
        self.end_all()

    def end_all(self) -> None:
        """Kill this process and all that the engine started; whoever sees first that the parent is
        gone calls it."""
        shutil.rmtree(self._folder, ignore_errors=True)
        os.killpg(os.getpgrp(), signal.SIGKILL)

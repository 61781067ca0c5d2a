"""Work that goes on while training does: one job at a time, in a thread of its own.

    training thread                            worker thread
      start(job)  waits for the job before ->    runs the job, keeps what it raised
      finish(s)   waits at most s seconds  <-    ends
                  raises what the job raised, once

The thread does not keep the process alive: whoever must not leave before the job has ended calls
`finish`.
"""

import threading
from collections.abc import Callable

COMMIT_TIMEOUT_SECONDS = 3600.0
"""A save that takes longer has stopped, not slowed down."""


class Background:
    """One job at a time."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    @property
    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, job: Callable[[], None]) -> None:
        """Run `job` once the one before has ended; what that one raised is raised here."""
        self.finish()
        self._thread = threading.Thread(target=self._run, args=(job,), name=self.name, daemon=True)
        self._thread.start()

    def finish(self, timeout_seconds: float = COMMIT_TIMEOUT_SECONDS) -> None:
        """Wait for the job, if there is one, and raise what it raised."""
        if self._thread is not None:
            self._thread.join(timeout_seconds)
            if self._thread.is_alive():
                raise TimeoutError(f"{self.name} has not ended within {timeout_seconds:g} s")
            self._thread = None
        self.check()

    def check(self) -> None:
        """Raise what a job raised that has ended; one that goes on is left alone."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            self._failure = error

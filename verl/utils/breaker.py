"""`Breaker`: when too many calls of a service fail, wait for it instead of working without it.

    calls --note(reason or None)--> the last 256 outcomes; more than 5% of them faults: open
    is_open: pause(probe) -> probe what worked before, until it works again or time is over

A few faults are retried or set aside by the caller. More of them bias whatever is made of the rest,
so the caller pauses. That calls fail does not mean that the service does: the probe repeats calls
that succeeded, and if they still do, it is the other calls that are bad.
"""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable

from verl.utils.environment import WentWrong

logger = logging.getLogger(__name__)

WINDOW = 256
MAX_SHARE = 0.05
MAX_PAUSE_SECONDS = 60.0
FIRST_PAUSE_SECONDS = 0.5

sleep = time.sleep


class Outage(WentWrong, RuntimeError):
    """A service stayed away; the message says what it answered."""


class Breaker:
    """Outcomes of the last calls of one service, from any thread."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._reasons: deque[str | None] = deque(maxlen=WINDOW)
        self._lock = threading.Lock()

    def note(self, reason: str | None) -> None:
        """One more call has ended; None if it succeeded."""
        with self._lock:
            self._reasons.append(reason)

    @property
    def is_open(self) -> bool:
        with self._lock:
            return sum(reason is not None for reason in self._reasons) > MAX_SHARE * WINDOW

    def pause(self, probe: Callable[[], float]) -> bool:
        """Wait until at most 5% of what `probe` repeats fails; False if that is so already.

        Raises `Outage` when it is not so within a minute.
        """
        if probe() <= MAX_SHARE:
            return False
        story = self._story()
        logger.warning("%s; pausing until it is back", story)
        begin, seconds = time.monotonic(), FIRST_PAUSE_SECONDS
        while True:
            sleep(seconds)
            waited = time.monotonic() - begin
            if probe() <= MAX_SHARE:
                break
            if waited > MAX_PAUSE_SECONDS:
                raise Outage(
                    f"{story}; it did not come back within {MAX_PAUSE_SECONDS:g} s. Nothing was "
                    "trained on meanwhile; start the same command again when the service is there"
                )
            seconds = min(2 * seconds, 8.0)
        with self._lock:
            self._reasons.clear()
        logger.warning("%s is back after %.1f s", self.name, waited)
        return True

    def _story(self) -> str:
        with self._lock:
            faults = [reason for reason in self._reasons if reason is not None]
            num_calls = len(self._reasons)
        reason, count = Counter(faults).most_common(1)[0]
        return (
            f"{self.name} failed in {len(faults)} of its last {num_calls} calls, {count} times "
            f"because: {reason}"
        )

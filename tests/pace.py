"""How slow this machine is at the moment, for limits that a busy machine must not break."""

import os
import time
from collections.abc import Callable

WORK_SECONDS = 0.02
PATIENCE = float(os.environ.get("TEST_PATIENCE", "1"))
"""Factor on the time after which a test is taken to hang; `make chaos` sets it."""


def pace() -> float:
    """How many times longer work takes than on a machine with nothing else to do; at least 1."""
    start, cpu_start = time.perf_counter(), time.thread_time()
    while time.thread_time() - cpu_start < WORK_SECONDS:
        pass
    measured = (time.perf_counter() - start) / WORK_SECONDS
    return max(1.0, measured, os.getloadavg()[0] / (os.cpu_count() or 1))


def wait_until(claim: Callable[[], object], what: str = "", seconds: float = 60.0) -> None:
    """Look until the claim holds: what other threads and processes do takes its time."""
    end = time.monotonic() + seconds * PATIENCE
    while not claim():
        assert time.monotonic() < end, what or claim
        time.sleep(0.01)

"""Looking after ranks while nobody calls them.

A daemon thread asks the back-end at intervals whether each rank is alive and logs a death once. It
never acts on it: the next call of the group raises `WorkerDied` on the caller's thread, where it
can be handled. The thread holds the back-end weakly and ends with it.
"""

import logging
import threading
import weakref

from verl.single_controller.base.backend import Backend

logger = logging.getLogger(__name__)


def watch_ranks(backend: Backend, group: str, every_n_seconds: float) -> threading.Thread:
    thread = threading.Thread(
        target=_watch,
        args=(weakref.ref(backend), backend.is_closed, group, every_n_seconds),
        name=f"watch {group}",
        daemon=True,
    )
    thread.start()
    return thread


def _watch(
    backend: "weakref.ref[Backend]",
    is_closed: threading.Event,
    group: str,
    every_n_seconds: float,
) -> None:
    dead: set[int] = set()
    while not is_closed.wait(every_n_seconds):
        dead |= _newly_dead(backend(), group, dead)


def _newly_dead(backend: Backend | None, group: str, known: set[int]) -> set[int]:
    if backend is None:
        return set()
    dead = set(backend.dead_ranks()) - known
    if backend.is_closed.is_set():  # they have been ended, not died
        return dead
    for rank in sorted(dead):
        logger.error("worker group %r: %s has died", group, backend.label(rank))
    return dead

"""Engines take one batch after another until none is left.

    batches: 0 1 2 3 4 ...          a thread per engine
      engine A: [0] [2] [4] ...       takes the next batch nobody has, generates, keeps it
      engine B: [1] [3] ...           lost: started again, the same batch once more
      caller:   waits for the threads; when one fails no other takes a further batch

An engine that is lost (`EngineLostError`) says nothing about the batch, so it is tried again a few
times. Anything else is a fault that would come back, and ends the run.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from verl.utils.environment import WentWrong
from verl.workers.rollout.base import EngineLostError, Rollout

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
WAKE_SECONDS = 0.5


class GenerationFailed(WentWrong, RuntimeError):
    """A batch could not be generated; those before it are kept."""


@dataclass(frozen=True)
class Engine:
    """An engine, how to bring it back when it was lost, and how to end it."""

    rollout: Rollout
    restart: Callable[[], None]
    close: Callable[[], None]


@dataclass(frozen=True)
class Batch:
    """Rows `first` to `last`, counted from 0, both included."""

    number: int
    first: int
    last: int

    @property
    def rows(self) -> range:
        return range(self.first, self.last + 1)

    def __str__(self) -> str:
        return f"batch {self.number} (rows {self.first + 1} to {self.last + 1})"


Work = Callable[[Rollout, Batch], None]


@dataclass
class Sharing:
    """What the threads have in common."""

    waiting: deque[Batch]
    work: Work
    error: BaseException | None = None
    num_restarts: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, engine: Engine) -> None:
        """One engine's thread: batches until there are none, or somebody failed."""
        try:
            while (batch := self._next()) is not None:
                self._attempt(engine, batch)
        except BaseException as error:  # `share` raises it
            with self.lock:
                self.error = self.error or error

    def _next(self) -> Batch | None:
        with self.lock:
            return None if self.error or not self.waiting else self.waiting.popleft()

    def _attempt(self, engine: Engine, batch: Batch) -> None:
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                return self.work(engine.rollout, batch)
            except EngineLostError as lost:
                logger.warning("%s lost its engine (attempt %d): %s", batch, attempt, lost)
                if self.error is not None:
                    return None  # the engines are being closed
                if attempt == MAX_ATTEMPTS:
                    raise GenerationFailed(
                        f"{batch} lost its engine {attempt} times; the last time: {lost}"
                    ) from lost
                with self.lock:
                    self.num_restarts += 1
                engine.restart()
            except ValueError as refused:
                raise GenerationFailed(f"{batch} is refused by the engine: {refused}") from refused
        return None


def share(batches: Sequence[Batch], engines: Sequence[Engine], work: Work) -> int:
    """Do `work` for every batch; how often an engine had to be started again."""
    sharing = Sharing(deque(batches), work)
    threads = [
        threading.Thread(target=sharing.run, args=(engine,), name=f"engine {number}", daemon=True)
        for number, engine in enumerate(engines)
    ]
    for thread in threads:
        thread.start()
    try:
        while sharing.error is None and any(thread.is_alive() for thread in threads):
            threads[0].join(timeout=WAKE_SECONDS)
            threads = [thread for thread in threads if thread.is_alive()] or threads
    except BaseException as interrupt:
        sharing.error = interrupt
        raise
    if sharing.error is not None:
        raise sharing.error
    return sharing.num_restarts

"""What a controller back-end supplies, and waiting for its ranks.

`Backend` is the whole contract: start the ranks, run a method on them, stop them. It knows nothing
of dispatch modes, batches or the wording of errors, which are the same for every back-end. It is
shared by all views of a group (`spawn`, `with_deadline`) and ends when the last of them is gone, at
`shutdown`, or when the interpreter exits.

`wait_for_results` waits for the ranks of one call. Every wait is bounded, and the first failure
ends it:

    driver                                      ranks
      submit ------------------------------->   run the method
      wait in slices  <----- a result --------  done
        | an exception or a death: a moment for the other failures, then raise
        | now and then: is a silent rank stopped by a signal?  twice in a row: raise
        | the deadline: ask the silent ranks for their stacks, then raise

The ranks never wait for the driver, so nobody has to be woken when it gives up. Between calls
`watch_ranks` logs a death, on a daemon thread that holds the back-end weakly and never acts on it:
the next call raises `WorkerDied` on the caller's thread, where it can be handled.
"""

import logging
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from verl.single_controller.base.failures import Failure, failure_error, timeout_error

logger = logging.getLogger(__name__)

DEFAULT_CALL_TIMEOUT_SECONDS = 3600.0
"""Longer than the longest single stage seen in practice (half-hour rollouts, checkpoint saves), so
that it never ends healthy work; collectives inside a worker have their own, shorter limits."""


SLICE_SECONDS = 0.5
AFTER_EXCEPTION_SECONDS = 2.0
"""How long to collect further failures: a death is often seen after the exceptions it causes, by
Ray up to 1.2 s later, and only a death lets a run start over."""
AFTER_DEATH_SECONDS = 0.2
MAX_STACKS = 8
"""Silent ranks whose stack is shown; peers in a collective mostly stand in the same place."""


@dataclass(frozen=True)
class Call:
    """One call of a group: who calls what, and until when an answer is of use."""

    group: str
    method: str
    timeout_seconds: float
    started: float = field(default_factory=time.monotonic)
    """On the monotonic clock, so that a jump of the wall clock changes nothing."""

    @property
    def deadline(self) -> float:
        return self.started + self.timeout_seconds

    def remaining_seconds(self) -> float:
        return self.deadline - time.monotonic()


class RankCall(NamedTuple):
    """A call on one rank, with its arguments."""

    rank: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Outcome(NamedTuple):
    """What one rank answered: a value, or why there is none."""

    value: Any = None
    failure: Failure | None = None


class Backend(ABC):
    """The ranks of one group. Methods other than `shutdown` may be called from several threads."""

    workers: list[Any]
    """One handle per rank, for users who want to look behind the group."""

    reference_type: type
    """The type of what `submit` gives."""

    is_this_process: bool = False
    """Whether the only rank is the calling process, so that it has `run_here`."""

    probe_seconds: float = 5.0
    """How often to look for stopped ranks during a long wait."""

    def __init__(self) -> None:
        self.is_closed = threading.Event()

    @property
    def world_size(self) -> int:
        return len(self.workers)

    @abstractmethod
    def submit(self, call: Call, method: str, rank_calls: Sequence[RankCall]) -> list[Any]:
        """Start `method` on the rank of each call and return one reference per call.

        Does not wait for the method, except where the rank is this very process. An object that
        several calls hold is transported once. A rank that is known to be dead gives a reference
        that has already failed.
        """

    def method_here(self, role: str, name: str) -> Callable[..., Any]:
        """A method of a role's worker in this process."""
        raise NotImplementedError(f"{type(self).__name__} has no rank in this process")

    def run_here(self, call: Call, function: Callable[..., Any], rank_call: RankCall) -> Any:
        """Call a function on the calling thread, within the call's deadline; its reference."""
        raise NotImplementedError(f"{type(self).__name__} has no rank in this process")

    @abstractmethod
    def wait(self, references: Sequence[Any], timeout_seconds: float) -> list[int]:
        """Positions of the references that have an outcome; waits until there is at least one."""

    @abstractmethod
    def outcomes(self, references: Sequence[Any]) -> list[Outcome]:
        """What came of references that `wait` has named."""

    @abstractmethod
    def stopped_ranks(self, ranks: Sequence[int]) -> list[int]:
        """The ranks of `ranks` whose process is stopped by a signal, so it cannot answer."""

    @abstractmethod
    def stack_of(self, rank: int) -> str:
        """Where a silent rank is: its Python stack, or the best that can be told."""

    @abstractmethod
    def deaths(self) -> dict[int, Failure]:
        """Ranks whose process is known to have ended, and what is known of how."""

    @abstractmethod
    def label(self, rank: int) -> str:
        """How messages name a rank, as in `rank 1 (pid 4711)`."""

    @abstractmethod
    def shutdown(self) -> None:
        """Set `is_closed` and end the ranks started here. Bounded; may be called again."""

    def share(self, parts: list[Any]) -> list[Any]:
        """Make each part cheap to give to several ranks of one call."""
        return parts


def wait_for_results(
    backend: Backend, call: Call, ranks: Sequence[int], references: Sequence[Any]
) -> list[Any]:
    """The values of `references`, which belong to `ranks`, in their order; or a `WorkerError`."""
    return ResultWait(backend, call, ranks, references).collect()


class ResultWait:
    """The state of one wait."""

    def __init__(
        self, backend: Backend, call: Call, ranks: Sequence[int], references: Sequence[Any]
    ) -> None:
        self.backend = backend
        self.call = call
        self.ranks = ranks
        self.values: list[Any] = [None] * len(references)
        self.waiting = dict(enumerate(references))  # position -> reference
        self.failures: dict[int, Failure] = {}  # rank -> failure, in order of arrival
        self.give_up_at = call.deadline
        self.stops = StopProbe(backend)

    def collect(self) -> list[Any]:
        while self.waiting:
            remaining = self.give_up_at - time.monotonic()
            self.take_finished(min(max(remaining, 0.0), SLICE_SECONDS))
            if remaining <= 0 and self.waiting:
                break
            self.probe()
        if self.failures:
            raise self.failure()
        if self.waiting:
            raise self.timeout(f"no answer within {self.call.timeout_seconds:g} s")
        return self.values

    def take_finished(self, timeout_seconds: float) -> None:
        positions = list(self.waiting)
        references = list(self.waiting.values())
        finished = self.backend.wait(references, timeout_seconds)
        outcomes = self.backend.outcomes([references[index] for index in finished])
        for index, outcome in zip(finished, outcomes, strict=True):
            position = positions[index]
            del self.waiting[position]
            if outcome.failure is None:
                self.values[position] = outcome.value
            else:
                self.note_failure(self.ranks[position], outcome.failure)

    def note_failure(self, rank: int, failure: Failure) -> None:
        self.failures[rank] = failure
        grace_seconds = AFTER_DEATH_SECONDS if failure.is_death else AFTER_EXCEPTION_SECONDS
        self.give_up_at = min(self.give_up_at, time.monotonic() + grace_seconds)

    def probe(self) -> None:
        if self.waiting and not self.failures and self.stops.found(self.silent()):
            raise self.timeout(self.stops.reason)

    def silent(self) -> list[int]:
        return [self.ranks[position] for position in self.waiting]

    def failure(self) -> Exception:
        involved = [*self.failures, *self.silent()]
        labels = {rank: self.backend.label(rank) for rank in involved}
        return failure_error(
            self.call.group, self.call.method, self.failures, labels, self.silent()
        )

    def timeout(self, reason: str) -> Exception:
        silent = self.silent()
        labels = {rank: self.backend.label(rank) for rank in silent}
        for rank in silent[:MAX_STACKS]:
            labels[rank] += f": {self.backend.stack_of(rank)}"
        return timeout_error(
            self.call.group, self.call.method, self.call.timeout_seconds, labels, reason
        )


class StopProbe:
    """A stopped process looks like a slow one; its state in the kernel tells them apart."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.next_probe = time.monotonic() + backend.probe_seconds
        self.suspects: set[int] = set()
        self.reason = f"a rank has been stopped by a signal for {backend.probe_seconds:g} s"

    def found(self, ranks: Sequence[int]) -> set[int]:
        """Those of `ranks` that are stopped and were when it looked before, which is seldom."""
        if time.monotonic() < self.next_probe:
            return set()
        self.next_probe = time.monotonic() + self.backend.probe_seconds
        before, self.suspects = self.suspects, set(self.backend.stopped_ranks(ranks))
        return before & self.suspects


class RankCheck:
    """For who waits for what a call has begun on the ranks: raises what a call would."""

    def __init__(self, backend: Backend, group: str, method: str, timeout_seconds: float) -> None:
        self.backend = backend
        self.group, self.method, self.timeout_seconds = group, method, timeout_seconds
        self.stops = StopProbe(backend)

    def __call__(self) -> None:
        deaths = self.backend.deaths()
        stopped = self.stops.found(range(self.backend.world_size))
        labels = {rank: self.backend.label(rank) for rank in (*deaths, *stopped)}
        if deaths:
            raise failure_error(self.group, self.method, deaths, labels, silent=[])
        if stopped:
            raise timeout_error(
                self.group, self.method, self.timeout_seconds, labels, self.stops.reason
            )


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
    dead = set(backend.deaths()) - known
    if backend.is_closed.is_set():  # they have been ended, not died
        return dead
    for rank in sorted(dead):
        logger.error("worker group %r: %s has died", group, backend.label(rank))
    return dead

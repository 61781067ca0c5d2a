"""Waiting for the ranks of one call: every wait is bounded, and the first failure ends it.

    driver (this module)                        ranks
      submit ------------------------------->   run the method
      wait in slices  <----- an answer -------  done
        | an exception or a death: a moment for the other failures, then raise
        | now and then: is a silent rank stopped by a signal?  twice in a row: raise
        | the deadline: ask the silent ranks for their stacks, then raise

The ranks never wait for the driver, so nobody has to be woken when it gives up.
"""

import time
from collections.abc import Sequence
from typing import Any

from verl.single_controller.base.backend import Backend, Call
from verl.single_controller.base.failures import Failure, failure_error, timeout_error

SLICE_SECONDS = 0.5
AFTER_EXCEPTION_SECONDS = 2.0
"""How long to collect further failures: a death is often seen after the exceptions it causes, by
Ray up to 1.2 s later, and only a death lets a run start over."""
AFTER_DEATH_SECONDS = 0.2
MAX_STACKS = 8
"""Silent ranks whose stack is shown; peers in a collective mostly stand in the same place."""


def wait_for_answers(
    backend: Backend, call: Call, ranks: Sequence[int], references: Sequence[Any]
) -> list[Any]:
    """The values of `references`, which belong to `ranks`, in their order; or a `WorkerError`."""
    return Answers(backend, call, ranks, references).collect()


class Answers:
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
        self.next_probe = time.monotonic() + backend.probe_seconds
        self.suspects: set[int] = set()

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
        patience = AFTER_DEATH_SECONDS if failure.is_death else AFTER_EXCEPTION_SECONDS
        self.give_up_at = min(self.give_up_at, time.monotonic() + patience)

    def probe(self) -> None:
        """A stopped process looks like a slow one; its state in the kernel tells them apart."""
        if self.failures or not self.waiting or time.monotonic() < self.next_probe:
            return
        self.next_probe = time.monotonic() + self.backend.probe_seconds
        stopped = set(self.backend.stopped_ranks(self.silent()))
        if stopped & self.suspects:
            seconds = self.backend.probe_seconds
            raise self.timeout(f"a rank has been stopped by a signal for {seconds:g} s")
        self.suspects = stopped

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
        places = {rank: self.backend.label(rank) for rank in silent}
        for rank in silent[:MAX_STACKS]:
            places[rank] += f": {self.backend.stack_of(rank)}"
        return timeout_error(
            self.call.group, self.call.method, self.call.timeout_seconds, places, reason
        )

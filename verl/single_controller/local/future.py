"""The answer of one local rank, which may not be there yet.

The counterpart of Ray's object reference. Where the rank is another process the answer stays packed
until somebody asks for it, so passing a future on to another rank costs the driver no copy and no
unpacking. A future that was sent to a worker process arrives there with its answer.
"""

import asyncio
import threading
from collections.abc import Generator, Sequence
from typing import Any

from verl.single_controller.base.backend import Backend, Call, Outcome, wait_for_results
from verl.single_controller.base.failures import Failure, failure_error
from verl.single_controller.local.payload import Payload


class LocalFuture:
    """Completed once, by the back-end that gave it out."""

    def __init__(
        self, call: Call, rank: int, backend: Backend | None, changed: threading.Condition
    ) -> None:
        self.call = call
        self.rank = rank
        self._backend = backend
        self._changed = changed  # shared by all futures of a back-end, so one wait covers many
        self._answer: Any = None
        self._failure: Failure | None = None
        self._is_done = False

    def complete(self, answer: Any = None, failure: Failure | None = None) -> None:
        with self._changed:
            self._answer, self._failure, self._is_done = answer, failure, True
            self._changed.notify_all()

    def done(self) -> bool:
        return self._is_done

    def wait(self, timeout_seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(self.done, timeout_seconds)

    @property
    def outcome(self) -> Outcome:
        """Only when done. Unpacks the answer anew each time."""
        answer = self._answer.unpickle() if isinstance(self._answer, Payload) else self._answer
        return Outcome(answer, self._failure)

    def result(self, timeout: float | None = None) -> Any:
        """The value, or the call's `WorkerError`; by default within the call's own deadline."""
        if self._backend is not None:
            call = self.call
            if timeout is not None:
                call = Call(call.group, call.method, timeout)
            return wait_for_results(self._backend, call, [self.rank], [self])[0]
        value, failure = self.outcome
        if failure is not None:
            label = {self.rank: f"rank {self.rank}"}
            call = self.call
            raise failure_error(call.group, call.method, {self.rank: failure}, label, [])
        return value

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.to_thread(self.result).__await__()

    def packed(self) -> Payload:
        """The answer in the form in which it travels; only when done and not failed."""
        if isinstance(self._answer, Payload):
            return self._answer
        return Payload.of(self._answer, f"the result of {self.call.method}")

    @property
    def failure(self) -> Failure | None:
        return self._failure

    def __reduce__(self) -> tuple[Any, ...]:
        if not self._is_done:
            raise ValueError(
                f"the result of {self.call.method} is not there yet; wait for it first"
            )
        payload = None if self._failure else self.packed()
        return _delivered, (self.call, self.rank, payload, self._failure)


def _delivered(
    call: Call, rank: int, payload: Payload | None, failure: Failure | None
) -> LocalFuture:
    future = LocalFuture(call, rank, None, threading.Condition())
    future.complete(payload, failure)
    return future


def finished_positions(
    futures: Sequence[LocalFuture], changed: threading.Condition, timeout_seconds: float
) -> list[int]:
    """Positions of the finished futures; waits until there is one."""

    def finished() -> list[int]:
        return [position for position, future in enumerate(futures) if future.done()]

    with changed:
        return changed.wait_for(finished, timeout_seconds) or []

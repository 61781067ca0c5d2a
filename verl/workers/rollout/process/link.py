"""The link to one running engine process, from its start to its end.

    any thread --call, submit--> queue --> thread `send` --> process
    pending calls <--answers, deltas-- thread `read` <------ process
                  <--EngineLostError--   |  the link ends, the process ends, it is silent, or one
                                         |  piece of its work takes too long: kill it, fail all

The reading thread wakes several times a second and is the only one that decides; in the end it
resolves everything that is pending, if only with the loss of the process. A process that is lost
stays lost; `client` starts another one with a link of its own.
"""

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as StillWaiting  # another class before Python 3.11
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from verl.workers.rollout.base import (
    EngineLostError,
    GenerationRequest,
    OnEnd,
    TokenDelta,
    TokenOutput,
)
from verl.workers.rollout.process.child import Child
from verl.workers.rollout.process.messages import delta_of, error_of, request_fields
from verl.workers.rollout.process.wire import Message, WireError, encode

logger = logging.getLogger(__name__)

OnDelta = Callable[[TokenDelta | None], None]
"""Told of every delta, and of None when there will be no more."""


class PendingCall:
    """`future` gets the answer, or the error."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.future: Future[Any] = Future()
        self.future.set_running_or_notify_cancel()  # who no longer waits must not disturb

    def succeed(self, value: Any) -> None:
        self.future.set_result(value)

    def fail(self, error: Exception) -> None:
        self.future.set_exception(error)


class PendingRequest(PendingCall):
    """Puts the deltas of a request together; `future` gets the list of its samples."""

    def __init__(
        self,
        number: int,
        request: GenerationRequest,
        on_delta: OnDelta | None = None,
        on_end: OnEnd | None = None,
    ) -> None:
        super().__init__(number)
        self.request = request
        self._submitted_at = time.monotonic()
        self._outputs = [TokenOutput() for _ in range(request.num_samples)]
        self._on_delta = on_delta
        self._on_end = on_end

    def add(self, delta: TokenDelta) -> bool:
        """True when this was the last of all."""
        output = self._outputs[delta.sample]
        if delta.token_ids and not output.token_ids:
            output.first_token_seconds = time.monotonic() - self._submitted_at
        output.add(delta)
        is_finished = all(output.stop_reason for output in self._outputs)
        if self._on_delta is not None:
            self._on_delta(delta)
        if self._on_end is not None and output.stop_reason:
            self._on_end(delta.sample, output)
        if is_finished:
            self.succeed(self._outputs)
        return is_finished

    def succeed(self, value: Any) -> None:
        super().succeed(value)
        self._tell_end()

    def fail(self, error: Exception) -> None:
        super().fail(error)
        self._tell_end()

    def _tell_end(self) -> None:
        if self._on_delta is not None:
            self._on_delta(None)


LOOK_SECONDS = 0.25
WAIT_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """How long the process may do what."""

    silent_seconds: float
    work_seconds: float
    """Timeout of one step, one call or one tensor of an update."""


class Link:
    """Sends calls to a process that has shaken hands, and gives what comes back to its owner."""

    def __init__(self, child: Child, timeouts: Timeouts) -> None:
        self._child = child
        self.timeouts = timeouts
        self.version: int | None = None
        """Version of the weights that the process holds complete."""

        self.cache_usage: float | None = None
        """Of the engine (`Rollout.cache_usage`), with its last tokens."""

        self.media_form = ""
        """How the engine takes images (`EngineFacts.media`)."""

        self._numbers = itertools.count()
        self._last = -1
        self._pending: dict[int, PendingCall] = {}
        self._lock = threading.Lock()  # guards what is pending and `_end`
        self._busy_seconds = 0.0
        self._is_closing = False
        self._end: str | None = None  # why nothing is answered any more
        self._outgoing: queue.SimpleQueue[tuple[bytes, int | None] | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="engine read", daemon=True)
        self._writer = threading.Thread(target=self._write, name="engine send", daemon=True)
        self._reader.start()
        self._writer.start()

    @property
    def is_alive(self) -> bool:
        return self._end is None and not self._child.has_ended()

    @property
    def pid(self) -> int:
        return self._child.pid

    def require_alive(self) -> None:
        if self._end is not None:
            raise EngineLostError(self._end)

    def submit(
        self,
        request: GenerationRequest,
        on_delta: OnDelta | None = None,
        on_end: OnEnd | None = None,
    ) -> PendingRequest:
        """Ask for tokens."""
        pending = PendingRequest(next(self._numbers), request, on_delta, on_end)
        fields = request_fields(request, self.media_form)
        self._send(pending, {"call": "submit", "request": fields})
        return pending

    def begin(self, name: str, *, descriptor: int | None = None, **arguments: Any) -> PendingCall:
        """Ask for anything else; `descriptor` must stay open here until the answer."""
        message: Message = {"call": name, **arguments}
        if descriptor is not None:
            message["descriptor"] = True
        pending = PendingCall(next(self._numbers))
        self._send(pending, message, descriptor)
        return pending

    def wait(self, pending: PendingCall) -> Any:
        """The answer. It comes, or the reading thread says that none will."""
        while True:
            try:
                return pending.future.result(timeout=WAIT_SECONDS)
            except StillWaiting:
                continue

    def call(self, name: str, *, descriptor: int | None = None, **arguments: Any) -> Any:
        return self.wait(self.begin(name, descriptor=descriptor, **arguments))

    def give_up(self, pending: PendingRequest) -> None:
        """Cancel a request; nothing happens if it has ended."""
        with self._lock:
            is_running = self._pending.pop(pending.number, None) is not None
        if is_running:
            self._tell("abort", request=pending.number)

    def abort(self, request_id: str) -> None:
        """End requests of that name; those who wait get what there is."""
        with self._lock:
            waiting = list(self._pending.values())
        for pending in waiting:
            if isinstance(pending, PendingRequest) and pending.request.request_id == request_id:
                self._tell("abort", request=pending.number)

    def close_session(self, session_id: str) -> None:
        self._tell("close_session", session_id=session_id)

    def close(self, grace_seconds: float) -> None:
        """End the process; those who still wait are told that it is lost."""
        self._is_closing = True
        if self._end is None:
            self._tell("close")
            self._child.end_within(grace_seconds)
        self._lose("it was closed")
        for thread in (self._reader, self._writer):
            thread.join(timeout=WAIT_SECONDS)

    def _tell(self, name: str, **arguments: Any) -> None:
        """Call without waiting; a process that is lost has forgotten everything anyway."""
        with suppress(EngineLostError):
            self.begin(name, **arguments)

    # ---- sending ---------------------------------------------------------------------------------

    def _send(self, pending: PendingCall, message: Message, descriptor: int | None = None) -> None:
        encoded = encode({**message, "number": pending.number})
        with self._lock:
            self.require_alive()
            self._pending[pending.number] = pending
            self._last = max(self._last, pending.number)
            self._outgoing.put((encoded, descriptor))

    def _write(self) -> None:
        """Write on a separate thread: a process in a long step reads nothing meanwhile."""
        while self._end is None:
            try:
                item = self._outgoing.get(timeout=WAIT_SECONDS)
            except queue.Empty:
                continue
            if item is None:
                return
            try:
                self._child.wire.send(*item)
            except WireError:  # the reading thread finds out why
                return

    # ---- reading ---------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            reason = self._read_until_lost()
            if not self._is_closing:
                logger.warning("engine process %d is lost: %s", self.pid, reason)
            self._lose(reason)
        except BaseException as error:
            self._lose(f"nobody reads what it says any more ({error!r})")
            raise

    def _read_until_lost(self) -> str:
        """Why it is lost."""
        heard = time.monotonic()
        while self._end is None:
            # Taken before the look: if this process was stopped itself, there is much to read now.
            now = time.monotonic()
            try:
                messages = self._child.wire.arrived(LOOK_SECONDS)
            except WireError as error:
                return str(error)
            if messages:
                heard = now
            elif now - heard > self.timeouts.silent_seconds:
                return f"it was silent for {now - heard:.0f} s"
            elif self._child.has_ended():
                return "it ended"
            for message in messages:
                try:
                    self._take(message)
                except (LookupError, TypeError, ValueError) as error:
                    return f"it sent something that cannot be understood ({error!r})"
            if self._busy_seconds > self.timeouts.work_seconds:
                return f"it was at one piece of work for {self._busy_seconds:.0f} s"
        return self._end

    def _take(self, message: Message) -> None:
        self._busy_seconds = float(message.get("heartbeat", 0.0))
        if "cache_usage" in message:
            self.cache_usage = message["cache_usage"]
        for row in message.get("deltas", ()):
            number, delta = delta_of(row)
            pending = self._pending.get(self._asked(number))
            if isinstance(pending, PendingRequest) and pending.add(delta):
                self._forget(number)
        if "answer" in message:
            pending = self._forget(self._asked(message["answer"]))
            if pending is not None and "error" in message:
                pending.fail(error_of(message))
            elif pending is not None:
                pending.succeed(message["value"])

    def _asked(self, number: int) -> int:
        """The number of a call that was made, though its caller may have given up."""
        if not 0 <= number <= self._last:
            raise ValueError(f"an answer to call {number}, which was never made")
        return number

    def _forget(self, number: int) -> PendingCall | None:
        with self._lock:
            return self._pending.pop(number, None)

    def _lose(self, reason: str) -> None:
        """Kill what is left of it and tell all who wait; only the first reason counts."""
        with self._lock:
            if self._end is not None:
                return
            self._end = f"the engine's process is lost: {reason}"
        if threading.current_thread() is not self._reader:
            self._reader.join(timeout=WAIT_SECONDS)  # it must not read a line that is closed
        try:
            self._child.end()
        finally:
            self._outgoing.put(None)
            with self._lock:
                self._end = f"{self._end}; {self._child.stderr_tail()}"
                waiting, self._pending = list(self._pending.values()), {}
            for pending in waiting:
                pending.fail(EngineLostError(self._end))

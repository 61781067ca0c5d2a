"""One rank in this very process: a call is a function call, and nothing is copied.

The worker is constructed and called on the caller's thread, which a debugger can follow from the
training loop into the model. As there is only one rank, this process itself is rank 0 of 1: the
environment says so while such a back-end exists.

A call has a deadline here too:

    calling thread                      timer thread
      run the function                    sleeps until the deadline
        |  <------- SIGVTALRM ---------   notes the stack, wakes the main thread
      DeadlinePassed is raised inside the function

A signal interrupts what Python can be interrupted in: sleeping, locks, sockets, Python code; a long
C call ends first. Only the main thread can be interrupted; on another thread the deadline is
noticed when the function returns. SIGVTALRM is used because user code (graders, schedulers) uses
the others.

A rank runs one call at a time, so a coroutine runs to completion on the rank's own thread, where
thread-bound state (the current CUDA device, grad mode) is as its other methods left it. All
coroutines of a thread share one event loop.
"""

import asyncio
import inspect
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

from verl.single_controller.base.backend import Backend, Call, Outcome, RankCall, wait_for_results
from verl.single_controller.base.colocation import ClassWithInitArgs
from verl.single_controller.base.decorator import plain_method
from verl.single_controller.base.failures import SHUT_DOWN, Failure, Guard
from verl.single_controller.local.future import LocalFuture, finished_positions
from verl.utils import environment
from verl.utils.ray_utils import get_event_loop


class InProcessBackend(Backend):
    reference_type = LocalFuture
    is_this_process = True

    def __init__(
        self, construct: Call, spec: ClassWithInitArgs, variables: Mapping[str, str]
    ) -> None:
        super().__init__()
        self._changed = threading.Condition()
        self._stack = ""
        self._lease = RankEnvironment.lease(variables)
        self.workers = [None]
        future = self.run_here(construct, spec, RankCall(0, (), {}))
        try:
            self.workers = wait_for_results(self, construct, [0], [future])
        except BaseException:
            self.shutdown()
            raise

    def submit(self, call: Call, method: str, rank_calls: Sequence[RankCall]) -> list[Any]:
        bound = getattr(self.workers[0], method)
        return [self.run_here(call, bound, rank_call) for rank_call in rank_calls]

    def method_here(self, role: str, name: str) -> Callable[..., Any]:
        worker = self.workers[0].worker_dict[role] if role else self.workers[0]
        return plain_method(getattr(worker, name))

    def run_here(
        self, call: Call, function: Callable[..., Any], rank_call: RankCall
    ) -> LocalFuture:
        """The future is done on return, unless the function ran too long."""
        future = LocalFuture(call, 0, self, self._changed)
        if self.is_closed.is_set():
            future.complete(failure=SHUT_DOWN)
            return future
        with Guard() as guard:
            args = [_value(arg, call) for arg in rank_call.args]
            kwargs = {key: _value(arg, call) for key, arg in rank_call.kwargs.items()}
            watch = Watch(call.remaining_seconds())
            try:
                try:
                    watch.start()
                    value = function(*args, **kwargs)
                    if inspect.iscoroutine(value):
                        value = completed(value, call.remaining_seconds())
                finally:
                    watch.stop()
                if watch.stack is None:
                    future.complete(value)
            except DeadlinePassed as passed:
                watch.stop()  # the signal may have come in the middle of the first stop
                if passed.watch is not watch:
                    raise
            self._stack = watch.stack or ""
        if guard.failure is not None:
            future.complete(failure=guard.failure)
        return future

    def wait(self, references: Sequence[Any], timeout_seconds: float) -> list[int]:
        return finished_positions(references, self._changed, timeout_seconds)

    def outcomes(self, references: Sequence[LocalFuture]) -> list[Outcome]:
        return [reference.outcome for reference in references]

    def stopped_ranks(self, ranks: Sequence[int]) -> list[int]:
        return []

    def stack_of(self, rank: int) -> str:
        return f"its stack at the deadline:\n{self._stack}"

    def deaths(self) -> dict[int, Failure]:
        return {}

    def label(self, rank: int) -> str:
        return f"rank {rank} (this process, pid {os.getpid()}, on {socket.gethostname()})"

    @property
    def meeting_point(self) -> tuple[str, str]:
        """Where this process meets others; the first back-end in it has chosen that."""
        return environment.variable("MASTER_ADDR"), environment.variable("MASTER_PORT")

    def shutdown(self) -> None:
        if not self.is_closed.is_set():
            self.is_closed.set()
            self._lease.end()


def _value(arg: Any, call: Call) -> Any:
    return arg.result(call.remaining_seconds()) if isinstance(arg, LocalFuture) else arg


class RankEnvironment:
    """The rank variables of this process, set while at least one back-end needs them."""

    _holders = 0
    _before: dict[str, str | None] = {}
    _lock = threading.Lock()

    @classmethod
    def lease(cls, variables: Mapping[str, str]) -> "RankEnvironment":
        with cls._lock:
            cls._holders += 1
            for name, value in variables.items():
                if name not in cls._before:  # the first back-end's meeting point serves all
                    is_set = environment.is_set(name)
                    cls._before[name] = environment.variable(name) if is_set else None
                    environment.set_variable(name, value)
        return cls()

    def end(self) -> None:
        with self._lock:
            RankEnvironment._holders -= 1
            if RankEnvironment._holders:
                return
            for name, value in self._before.items():
                if value is None:
                    environment.remove_variable(name)
                else:
                    environment.set_variable(name, value)
            self._before.clear()


class DeadlinePassed(BaseException):
    """Raised inside the function; not an `Exception`, so that its own handlers let it pass."""

    def __init__(self, watch: "Watch") -> None:
        super().__init__()
        self.watch = watch


class Watch:
    """One running function; those of the main thread can be nested.

    try:
        try:
            watch.start()
            function()
        finally:
            watch.stop()
    except DeadlinePassed as passed:
        watch.stop()  # the signal may have come in the middle of the first stop
        if passed.watch is not watch:
            raise
    watch.stack  # where the function was at its deadline; None if it was in time
    """

    active: "list[Watch]" = []  # outermost first

    def __init__(self, seconds: float) -> None:
        self.stack: str | None = None
        self.has_raised = False
        self._thread = threading.current_thread()
        self._timer = threading.Timer(max(seconds, 0.0), self._expire)
        self._timer.daemon = True

    def start(self) -> None:
        if self._is_on_main_thread():
            Watch.active.append(self)
            # It stays installed: a signal that comes late finds no watch and does nothing.
            signal.signal(signal.SIGVTALRM, _raise_in_main_thread)
        self._timer.start()

    def stop(self) -> None:
        self._timer.cancel()
        if self in Watch.active:
            Watch.active.remove(self)

    def _is_on_main_thread(self) -> bool:
        return self._thread is threading.main_thread()

    def _expire(self) -> None:
        ident = self._thread.ident or 0
        frame = sys._current_frames().get(ident)
        self.stack = "".join(traceback.format_stack(frame)).rstrip()
        if self._is_on_main_thread():
            signal.pthread_kill(ident, signal.SIGVTALRM)


def _raise_in_main_thread(number: int, frame: FrameType | None) -> None:
    for watch in Watch.active:
        if watch.stack is not None and not watch.has_raised:
            watch.has_raised = True
            raise DeadlinePassed(watch)


def call_method(
    method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], seconds: float
) -> Any:
    """The result of a sync or async method; `seconds` bounds the wait for another thread."""
    result = method(*args, **kwargs)
    return completed(result, seconds) if inspect.iscoroutine(result) else result


def completed(coroutine: Coroutine[Any, Any, Any], seconds: float) -> Any:
    loop = get_event_loop()
    if not loop.is_running():
        return loop.run_until_complete(coroutine)
    # The caller is itself a coroutine on this thread: another thread has to run this one.
    helper = ThreadPoolExecutor(max_workers=1)
    try:
        return helper.submit(asyncio.run, coroutine).result(timeout=seconds)
    finally:
        helper.shutdown(wait=False)

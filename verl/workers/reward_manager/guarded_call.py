"""The boundary where a user's reward function is called: whatever it does, a `Grade` comes back.

    async function    awaited on the event loop, cut off at the deadline by cancellation
    plain function    run on one of `num_workers` daemon threads; at the deadline the thread is left
                      behind and another takes its place (a thread cannot be killed)
    isolate=True      run in one of `num_workers` processes, which is killed at the deadline and
                      replaced; a process that dies is replaced too, and the call made again

A thread shares the function's state with this process (caches, clients, models), which is what most
reward functions expect. It cannot be interrupted inside one long C call that keeps the interpreter
lock, such as a regular expression that backtracks for ever; functions that may do that on a model's
output need `isolate=True`. The clock of a call starts when the function starts.
"""

import asyncio
import functools
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from verl.workers.reward_manager.async_functions import awaited, is_async
from verl.workers.reward_manager.results import Grade, InfraError, safe_grade
from verl.workers.reward_manager.worker_pool import WorkerPool

Job = tuple[Callable[[], Any], asyncio.AbstractEventLoop, "asyncio.Future[Any]"]


class Pool(Protocol):
    """Processes that grade; every call ends by itself."""

    def call(self, kwargs: Mapping[str, Any]) -> Grade: ...
    def close(self) -> None: ...


class GuardedCall:
    """`await guarded(kwargs)` is the grade that `function(**kwargs)` means."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        timeout_seconds: float,
        num_workers: int = 1,
        max_concurrent: int = 64,
        isolate: bool = False,
        make_pool: Callable[..., Pool] = WorkerPool,
    ) -> None:
        for name, value in (("timeout_seconds", timeout_seconds), ("num_workers", num_workers)):
            if value <= 0:
                raise ValueError(f"{name} of the reward manager is {value}; it must be positive")
        self.function = function
        self.timeout_seconds = timeout_seconds
        self.is_async = is_async(function)
        self.isolate = isolate
        self.max_concurrent = max_concurrent if self.is_async and not isolate else num_workers
        self._threads = DaemonThreads()
        self._pool = make_pool(function, timeout_seconds=timeout_seconds) if isolate else None

    async def __call__(self, kwargs: Mapping[str, Any]) -> Grade:
        """Callers keep to `max_concurrent` calls at a time."""
        return safe_grade(await self.outcome(kwargs))

    async def outcome(self, kwargs: Mapping[str, Any]) -> Any:
        """What the function returned (in another process: the grade it means), or the fault."""
        if self._pool is not None:  # which keeps the time itself
            return await self._threads.run(functools.partial(self._pool.call, kwargs))
        call = functools.partial(self.function, **kwargs)
        try:
            started = awaited(call()) if self.is_async else self._threads.run(call)
            return await asyncio.wait_for(started, self.timeout_seconds)
        except asyncio.TimeoutError:
            text = f"the reward function took longer than {self.timeout_seconds} s"
            return InfraError(text, is_timeout=True)
        except Exception as error:
            return InfraError(f"the reward function raised {type(error).__name__}: {error}")

    def close(self) -> None:
        """End the worker processes, if there are any."""
        if self._pool is not None:
            self._pool.close()


class DaemonThreads:
    """Threads for calls that may never return; they do not keep the program alive.

    A call takes a waiting thread, or starts one. A thread whose call was given up returns to the
    others if that call ends after all.
    """

    def __init__(self) -> None:
        self._idle: list[queue.SimpleQueue[Job]] = []

    def run(self, call: Callable[[], Any]) -> "asyncio.Future[Any]":
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        inbox = self._idle.pop() if self._idle else self._start()
        inbox.put((call, loop, future))
        return future

    def _start(self) -> "queue.SimpleQueue[Job]":
        inbox: queue.SimpleQueue[Job] = queue.SimpleQueue()
        threading.Thread(target=self._work, args=(inbox,), daemon=True, name="reward").start()
        return inbox

    def _work(self, inbox: "queue.SimpleQueue[Job]") -> None:
        while True:
            call, loop, future = inbox.get(block=True)  # a daemon: it waits for work, not for us
            outcome = outcome_of(call)
            self._idle.append(inbox)
            if not loop.is_closed():
                loop.call_soon_threadsafe(_settle, future, outcome)


def call_with_deadline(call: Callable[[], Any], seconds: float, name: str) -> Any:
    """What `call` returns or raises, on a thread of its own; `TimeoutError` if it takes longer."""
    outcomes: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
    threading.Thread(target=lambda: outcomes.put(outcome_of(call)), daemon=True, name=name).start()
    try:
        result, error = outcomes.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"{name} took longer than {seconds} s") from None
    if error is not None:
        raise error
    return result


def outcome_of(call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    try:
        return call(), None
    except BaseException as error:
        return None, error


def _settle(future: "asyncio.Future[Any]", outcome: tuple[Any, BaseException | None]) -> None:
    if future.done():  # given up at the deadline
        return
    result, error = outcome
    if error is None:
        future.set_result(result)
    elif isinstance(error, Exception) and not isinstance(error, StopIteration):
        future.set_exception(error)
    else:  # SystemExit and the like end a thread's call, not the run
        future.set_exception(RuntimeError(repr(error)))

"""The boundary where a user's reward function is called: whatever it does, a `Grade` comes back.

    async function    awaited on the event loop, cut off at the deadline by cancellation
    plain function    run on one of `num_workers` daemon threads; at the deadline the thread is left
                      behind and another takes its place (a thread cannot be killed)
    isolate=True      run in a forked child process, which is killed at the deadline

A thread shares the function's state with this process (caches, clients, models), which is what most
reward functions expect. It cannot be interrupted inside one long C call that keeps the interpreter
lock, such as a regular expression that backtracks for ever; functions that may do that on a model's
output need `isolate=True`. The clock of a call starts when the function starts.
"""

import asyncio
import functools
import inspect
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any

from verl.utils.timeout import call_in_child
from verl.workers.reward_manager.results import Grade, InfraError, as_grade

KILL_SECONDS = 5.0
Job = tuple[Callable[[], Any], asyncio.AbstractEventLoop, "asyncio.Future[Any]"]


class GuardedCall:
    """`await guarded(**kwargs)` is the grade that `function(**kwargs)` means."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        timeout_seconds: float,
        num_workers: int = 1,
        max_concurrent: int = 64,
        isolate: bool = False,
    ) -> None:
        for name, value in (("timeout_seconds", timeout_seconds), ("num_workers", num_workers)):
            if value <= 0:
                raise ValueError(f"{name} of the reward manager is {value}; it must be positive")
        self.function = function
        self.timeout_seconds = timeout_seconds
        self.is_async = is_async(function)
        self.isolate = isolate
        self.max_concurrent = max_concurrent if self.is_async and not isolate else num_workers
        self._threads = _DaemonThreads()

    async def __call__(self, kwargs: Mapping[str, Any]) -> Grade:
        """Callers keep to `max_concurrent` calls at a time."""
        call = functools.partial(self.function, **kwargs)
        try:
            if self.isolate:
                limit = self.timeout_seconds + KILL_SECONDS
                result = await asyncio.wait_for(self._threads.run(self._in_child(call)), limit)
            elif self.is_async:
                result = await asyncio.wait_for(call(), self.timeout_seconds)
            else:
                result = await asyncio.wait_for(self._threads.run(call), self.timeout_seconds)
        except asyncio.TimeoutError:
            text = f"the reward function took longer than {self.timeout_seconds} s"
            return InfraError(text, is_timeout=True)
        except Exception as error:
            return InfraError(f"the reward function raised {type(error).__name__}: {error}")
        if inspect.iscoroutine(result):
            result.close()
            return InfraError("the reward function returned a coroutine; declare it `async def`")
        return as_grade(result)

    def _in_child(self, call: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            return asyncio.run(call()) if self.is_async else call()

        return lambda: call_in_child(run, self.timeout_seconds, "the reward function")


class _DaemonThreads:
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
            outcome = _outcome(call)
            self._idle.append(inbox)
            if not loop.is_closed():
                loop.call_soon_threadsafe(_settle, future, outcome)


def _outcome(call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
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


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives a coroutine; also for partial and callable objects."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or (
        not inspect.isroutine(function) and inspect.iscoroutinefunction(type(function).__call__)
    )

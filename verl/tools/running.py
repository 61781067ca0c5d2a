"""Where the code of tools runs: beside the event loop of the agent loops, with a deadline.

    agent loops' event loop --- Job ---> Threads     one daemon thread per running blocking call
              |                 Job ---> ToolLoop    one daemon thread with an event loop of its own
              +-- waits for Job.ended, at most until the deadline; then it abandons the job

Code of users may block, never return, swallow its cancellation, fork or call `sys.exit`. None of it
reaches the agent loops: they wait for a future of their own loop. A blocking call that is abandoned
keeps its thread, which no longer counts against the limit; too many of them are a fault of the
world. An awaited call that blocks stops the other awaited calls, not the agent loops; when the
thread stays blocked, the next call gets a new one.
"""

import asyncio
import contextvars
import logging
import threading
import time
import types
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from verl.protocol.trajectory import InfraFault
from verl.utils.processes import forks_end_here

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
GRACE_SECONDS = 0.5
"""How long the thread of awaited calls may take to answer before it counts as blocked."""
REPLACE_SECONDS = 5.0
"""How long it may stay blocked before another one takes new calls."""
CLOSE_SECONDS = 2.0
"""How long closing waits for it to end."""


class DeadlineExceeded(Exception):
    """A call did not end in time; `has_ended`: it did when it was cancelled."""

    def __init__(self, *, has_ended: bool = False) -> None:
        super().__init__()
        self.has_ended = has_ended


class Job:
    """One call on its way: what runs, and futures on the caller's event loop that tell of it."""

    def __init__(self, tool: str, work: Callable[[], Any]) -> None:
        self.tool = tool
        self.work = work
        self.context = contextvars.copy_context()
        self.is_abandoned = False
        self.is_finished = False
        self.task: asyncio.Task[None] | None = None
        self.outcome: tuple[Any, BaseException | None] = (None, asyncio.CancelledError())
        """Of an awaited call; one that is cancelled before it begins keeps this."""
        self._caller = asyncio.get_running_loop()
        self.began: asyncio.Future[None] = self._caller.create_future()
        self.ended: asyncio.Future[tuple[Any, BaseException | None]] = self._caller.create_future()

    def tell(self, future: asyncio.Future[Any], value: Any = None) -> None:
        """Settle one of the futures, from any thread."""

        def settle() -> None:
            if not future.done():
                future.set_result(value)

        with suppress(RuntimeError):  # the caller's loop is closed: nobody waits
            self._caller.call_soon_threadsafe(settle)

    async def returned(self) -> Any:
        """What the call returned; its exception is raised, `SystemExit` and the like as an error
        of the call, not of the caller."""
        value, error = await self.ended
        if error is not None and not isinstance(error, Exception):
            raise RuntimeError(repr(error)) from error
        if error is not None:
            raise error
        return value


class Threads:
    """Daemon threads for blocking calls: at most `limit` at once, further calls wait their turn."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.hung: dict[Job, str] = {}
        """Abandoned calls whose threads still run."""
        self._num_running = 0
        self._waiting: deque[Job] = deque()
        self._lock = threading.Lock()

    async def run(self, tool: str, work: Callable[[], Any], seconds: float) -> Any:
        """The result of `work`; the deadline counts from when a thread takes it."""
        if len(self.hung) >= self.limit:
            names = ", ".join(sorted(set(self.hung.values())))
            raise InfraFault(
                f"{len(self.hung)} calls of blocking tools have not ended after their deadlines "
                f"({names}); no more threads are started. Give the tool a time-out of its own, or "
                "raise rollout.multi_turn.max_tool_threads"
            )
        job = Job(tool, work)
        try:
            self._submit(job)
            await job.began
            await asyncio.wait({job.ended}, timeout=seconds)
            if not job.ended.done():
                raise DeadlineExceeded
            return await job.returned()
        finally:
            if not job.ended.done():
                self._abandon(job)

    def _submit(self, job: Job) -> None:
        with self._lock:
            if self._num_running >= self.limit:
                self._waiting.append(job)
                return
            self._num_running += 1
        self._start(job)

    def _start(self, job: Job) -> None:
        name = f"tool-{job.tool}"
        try:
            threading.Thread(target=self._work, args=(job,), name=name, daemon=True).start()
        except RuntimeError as error:  # the machine has no more threads
            job.tell(job.began)
            job.tell(job.ended, (None, InfraFault(f"no thread for tool {job.tool!r}: {error}")))
            self._next()

    def _work(self, job: Job | None) -> None:
        while job is not None:
            job.tell(job.began)
            outcome: tuple[Any, BaseException | None]
            try:
                with forks_end_here():
                    outcome = job.context.run(job.work), None
            except BaseException as error:
                outcome = None, error
            job.tell(job.ended, outcome)
            with self._lock:
                job.is_finished = True
                if self.hung.pop(job, None) is not None:
                    return  # its place was given away when it was abandoned
                job = self._take()

    def _take(self) -> Job | None:
        """The next waiting job, or None after giving the place up; the lock is held."""
        if self._waiting:
            return self._waiting.popleft()
        self._num_running -= 1
        return None

    def _next(self) -> None:
        with self._lock:
            job = self._take()
        if job is not None:
            self._start(job)

    def _abandon(self, job: Job) -> None:
        with self._lock:
            if job in self._waiting:
                self._waiting.remove(job)
                return
            if job.is_finished:
                return
            self.hung[job] = job.tool
        self._next()


class ToolLoop:
    """A daemon thread with an event loop, for calls that are coroutines."""

    def __init__(self) -> None:
        self.hung: dict[Job, str] = {}
        """Abandoned calls that did not end when they were cancelled."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._blocked_since: float | None = None

    async def run(self, tool: str, work: Callable[[], Awaitable[Any]], seconds: float) -> Any:
        """The result of awaiting what `work` returns."""
        loop = self._live_loop()
        job = Job(tool, work)
        loop.call_soon_threadsafe(self._begin, job, context=job.context)
        try:
            await asyncio.wait({job.ended}, timeout=seconds)
            if not job.ended.done():
                raise await self._overdue(job, loop)
            return await job.returned()
        finally:
            if not job.ended.done() and not job.is_abandoned:
                self._abandon(job, loop)

    async def _overdue(self, job: Job, loop: asyncio.AbstractEventLoop) -> Exception:
        """What it means that a call has not ended: its own delay, or another call that blocks."""
        pong = Job(job.tool, job.work)
        self._abandon(job, loop)
        loop.call_soon_threadsafe(pong.tell, pong.ended)
        await asyncio.wait({job.ended}, timeout=GRACE_SECONDS)
        if job.ended.done() or pong.ended.done():
            return DeadlineExceeded(has_ended=job.ended.done())
        blocker = asyncio.current_task(loop)
        if self._blocked_since is None:
            self._blocked_since = time.monotonic()
            name = "a tool" if blocker is None else f"tool {blocker.get_name()!r}"
            logger.warning(
                "%s blocks the thread that all awaited tools share; make its method a plain def, "
                "or await asyncio.to_thread(...) in it",
                name,
            )
        if blocker is not None and blocker is not job.task:
            return InfraFault(
                f"tool {job.tool!r} waited for tool {blocker.get_name()!r}, which blocks"
            )
        return DeadlineExceeded()

    def _live_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            since = self._blocked_since
            is_lost = since is not None and time.monotonic() - since > REPLACE_SECONDS
            if self._loop is None or is_lost:
                self._loop, self._blocked_since = asyncio.new_event_loop(), None
                self._thread = threading.Thread(
                    target=serve, args=(self._loop,), name="tool-loop", daemon=True
                )
                self._thread.start()
            return self._loop

    def start(self, work: "Coroutine[Any, Any, Result]") -> "Future[Result]":
        """Run code of ours to its end, whatever becomes of the caller."""
        return asyncio.run_coroutine_threadsafe(work, self._live_loop())

    def _begin(self, job: Job) -> None:
        """On the loop's thread."""
        self._blocked_since = None
        if job.is_abandoned:
            job.tell(job.ended, job.outcome)
        else:
            job.task = asyncio.get_running_loop().create_task(work_of(job), name=job.tool)
            job.task.add_done_callback(partial(self._end, job))

    def _end(self, job: Job, task: asyncio.Task[Any]) -> None:
        del task
        self.hung.pop(job, None)
        job.tell(job.ended, job.outcome)

    def _abandon(self, job: Job, loop: asyncio.AbstractEventLoop) -> None:
        def cancel() -> None:
            if job.task is not None and not job.task.done():
                self.hung[job] = job.tool
                job.task.cancel()

        job.is_abandoned = True
        loop.call_soon_threadsafe(cancel)

    def close(self) -> None:
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None and self._thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join(timeout=CLOSE_SECONDS)


async def work_of(job: Job) -> None:
    """Set the outcome of a call; whatever it raises stays in it."""
    try:
        job.outcome = await stepwise(job.work), None
    except BaseException as error:
        job.outcome = None, error


def serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop until it is stopped; what still runs then is cancelled."""
    loop.run_forever()
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks, timeout=GRACE_SECONDS))
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


@types.coroutine
def stepwise(work: Callable[[], Awaitable[Any]]) -> Generator[Any, Any, Any]:
    """Await what `work` returns; a fork made between two waits ends before it comes to the loop."""
    value: Any = None
    error: BaseException | None = None
    steps: Any = None
    while True:
        try:
            with forks_end_here():
                if steps is None:
                    steps = work().__await__()
                wait = steps.send(value) if error is None else steps.throw(error)
        except StopIteration as end:
            return end.value
        value = error = None
        try:
            value = yield wait
        except BaseException as thrown:  # handed to the tool in the next step
            error = thrown

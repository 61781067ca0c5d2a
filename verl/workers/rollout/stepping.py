"""A thread on which an engine steps, and the requests that wait for it.

    any thread:  post(command) --+--> thread: commands, step, commands, step, ... park when idle
    event loop:  post(command) --+
    any thread:  with paused(): ...   the thread waits between two steps

Commands posted in one turn of an event loop arrive together, after the turn: requests that begin
at the same time enter the engine in the same step, whatever the threads are doing. The thread
starts with the first command. It keeps the engine alive only while there is work, so an engine
that nobody refers to any more is freed, and its thread ends.
"""

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, Generic, TypeVar

import torch

from verl.utils.device import torch_module_of
from verl.workers.rollout.base import GenerationRequest, OnEnd, TokenDelta, TokenOutput

JOIN_SECONDS = 5.0

Owner = TypeVar("Owner")
Command = tuple[Callable[..., None], tuple[Any, ...]]
TurnKey = asyncio.AbstractEventLoop | int
"""An event loop, or a thread without one."""


class Submission:
    """A submitted request; `future` resolves when all its samples have ended."""

    def __init__(
        self,
        request: GenerationRequest,
        on_end: OnEnd | None,
        on_delta: Callable[[TokenDelta], None] | None = None,
    ) -> None:
        self.request = request
        self.on_delta = on_delta
        """Told of the new tokens after each step, where somebody listens."""

        self.future: Future[list[TokenOutput]] = Future()
        self._on_end = on_end
        self._outputs: dict[int, TokenOutput] = {}
        self._error: Exception | None = None

    @property
    def is_complete(self) -> bool:
        return len(self._outputs) == self.request.num_samples

    def end(self, sample: int, output: TokenOutput) -> None:
        """Take the output of a sample that has ended; if `on_end` raises, the future does."""
        self._outputs[sample] = output
        if self._on_end is not None and not self.future.cancelled():
            try:
                self._on_end(sample, output)
            except Exception as error:
                self._error = error

    def resolve(self) -> None:
        """Give the future its result; nothing to do if the caller has cancelled it."""
        if self._error is not None:
            self.fail(self._error)
        elif self.future.set_running_or_notify_cancel():
            self.future.set_result([self._outputs[i] for i in range(self.request.num_samples)])

    def fail(self, error: BaseException) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class DeltaFeed:
    """Hands deltas from a thread to one coroutine of an event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._arrived: deque[TokenDelta | None] = deque()
        self._arrival: asyncio.Future[None] = loop.create_future()

    def put(self, delta: TokenDelta | None) -> None:
        """Called on the thread; None is the last."""
        with suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(self._take, delta)

    async def next(self) -> TokenDelta | None:
        """None when there will be no more."""
        while not self._arrived:
            self._arrival = self._loop.create_future()
            await self._arrival
        return self._arrived.popleft()

    def _take(self, delta: TokenDelta | None) -> None:
        self._arrived.append(delta)
        if not self._arrival.done():
            self._arrival.set_result(None)


class EngineThread(Generic[Owner]):
    """Calls `step(owner)` while it returns True; `owner` is the engine that this belongs to."""

    def __init__(
        self,
        owner: Owner,
        step: Callable[[Owner], bool],
        *,
        name: str,
        device: torch.device | None = None,
    ) -> None:
        self._owner = weakref.ref(owner)
        self._step = step
        self._name = name
        self._device = device
        self._thread: threading.Thread | None = None
        self._state = threading.Condition()  # guards all below
        self._commands: deque[Command] = deque()
        self._turns: dict[TurnKey, list[Command]] = {}
        self._has_work = False
        self._working: Owner | None = None  # keeps the engine alive while there is work
        self._is_taken = False  # somebody steps, or has the engine to themselves
        self._num_waiting = 0  # for `paused`, which goes before the next step
        self._is_closed = False
        weakref.finalize(owner, self.close)

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def post(self, function: Callable[..., None], *args: Any) -> None:
        """Have `function(owner, *args)` called between two steps; it must not raise."""
        with self._state:
            self._working = self._owner()
            turn = self._turns.get(_turn_key())
            if turn is not None:  # not before what was posted earlier in the turn
                turn.append((function, args))
                return
        self._arrive([(function, args)])

    def post_with_turn(self, function: Callable[..., None], *args: Any) -> None:
        """The same together with all else that is posted in this turn of an event loop."""
        key = _turn_key()
        if isinstance(key, asyncio.AbstractEventLoop):
            with self._state:
                if key not in self._turns:
                    self._turns[key] = []
                    key.call_soon(self._end_turn, key)
        self.post(function, *args)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Have all that this thread posts in the context arrive together."""
        key = _turn_key()
        with self._state:
            is_outermost = key not in self._turns
            if is_outermost:
                self._turns[key] = []
        try:
            yield
        finally:
            if is_outermost:
                self._end_turn(key)

    def submit(
        self,
        request: GenerationRequest,
        on_end: OnEnd | None,
        add: Callable[[Owner, Submission], None],
        cancel: Callable[[Owner, Future[list[TokenOutput]]], None],
        on_delta: Callable[[TokenDelta], None] | None = None,
    ) -> Future[list[TokenOutput]]:
        """Have `add` called with a request; and `cancel` with its future, if that is cancelled."""
        submission = Submission(request, on_end, on_delta)
        if self._is_closed:
            submission.fail(RuntimeError("the engine was closed"))
            return submission.future
        self.post_with_turn(add, submission)

        def note_cancellation(future: Future[list[TokenOutput]]) -> None:
            if future.cancelled():
                self.post(cancel, future)

        submission.future.add_done_callback(note_cancellation)
        return submission.future

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Have the engine to oneself between two steps, all posted commands done."""
        with self._state:
            self._num_waiting += 1
            self._state.wait_for(lambda: not self._is_taken)
            self._num_waiting -= 1
            self._is_taken = True
        try:
            owner = self._owner()
            assert owner is not None, "whoever pauses an engine refers to it"
            self._run_commands(owner)
            yield
        finally:
            self._end_step(has_more=False)  # what there was to do has been noted before

    def close(self) -> None:
        """End the thread after its current step. What it has not done stays undone."""
        with self._state:
            self._is_closed = True
            self._working = None
            thread = self._thread
            self._state.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=JOIN_SECONDS)

    def run_commands(self) -> None:
        """Do what has been posted; for whoever steps."""
        owner = self._owner()
        assert owner is not None
        self._run_commands(owner)

    def _run_commands(self, owner: Owner) -> None:
        while self._commands:
            function, args = self._commands.popleft()
            function(owner, *args)

    def _end_turn(self, key: TurnKey) -> None:
        with self._state:
            commands = self._turns.pop(key)
        self._arrive(commands)

    def _arrive(self, commands: Sequence[Command]) -> None:
        with self._state:
            self._commands.extend(commands)
            self._has_work = True
            if self._is_closed:
                return
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._state.notify_all()

    # ---- on the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        if self._device is not None and self._device.type != "cpu":
            torch_module_of(self._device.type).set_device(self._device)
        while self._wait_for_work():  # nothing here refers to the engine meanwhile
            owner = self._owner()
            if owner is None:
                return
            while self._begin_step():
                has_more = False
                try:
                    self._run_commands(owner)
                    has_more = self._step(owner)
                finally:
                    self._end_step(has_more)
            del owner

    def _wait_for_work(self) -> bool:
        """False when the thread is to end."""
        with self._state:
            self._state.wait_for(lambda: self._has_work or self._is_closed)
            return not self._is_closed

    def _begin_step(self) -> bool:
        """False when there is nothing to do."""
        with self._state:
            self._state.wait_for(
                lambda: (not self._is_taken and not self._num_waiting) or self._is_closed
            )
            if self._is_closed or not self._has_work:
                self._working = None
                return False
            self._has_work, self._is_taken = False, True
            return True

    def _end_step(self, has_more: bool) -> None:
        with self._state:
            self._has_work = self._has_work or has_more
            self._is_taken = False
            self._state.notify_all()


def _turn_key() -> TurnKey:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return threading.get_ident()

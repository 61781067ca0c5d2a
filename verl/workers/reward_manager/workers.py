"""Calls a reward function in processes that can be killed.

A call that takes too long ends with its worker killed, inside C code or not. A worker that dies
under a call (out of memory, a crash in C, somebody's `kill`), is stopped by a signal, or says
something else than the reply to its call, tells nothing about the response: it is killed and the
call is repeated on a new worker, a few times. Either way the next call gets a worker.

Arguments go out as the trainer pickles them; what comes back is plain data (`codec`), so nothing
that runs in a worker becomes code in the trainer. A fork that a function makes never replies.

Workers are copies of the trainer from the moment the reward manager was made
(`verl.utils.forked_workers`): they start in milliseconds, however large the trainer has grown, and
take any function, closures too.

`RayWorkerPool` does the same with actors on all machines of a Ray cluster; they take any function
that Ray can serialize.
"""

import asyncio
import functools
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from verl.protocol import codec
from verl.protocol.trajectory import Abstain, Grade, InfraError, Score
from verl.single_controller.local.payload import Payload
from verl.utils.forked_workers import (
    LostWorkerError,
    WorkerProcesses,
    await_reply,
    fork_server,
)
from verl.utils.import_utils import require
from verl.utils.line import BrokenLineError, Line, Octets, call_numbers
from verl.utils.processes import die_with_parent, forks_end_here, num_oom_kills
from verl.workers.reward_manager.grader import as_grade, checked, infra_error_of, is_async

MAX_RETRIES = 3
START_SECONDS = 120.0
"""Until an actor replies for the first time; it has to import the package."""

MAX_CALL_BYTES = 1 << 40
MAX_REPLY_BYTES = 64 << 20


class WorkerPool:
    """`call(kwargs)` is the grade that `function(**kwargs)` means, found in another process.

    Callers keep to as many calls at a time as they want processes. Workers start when needed and
    stay. What they know of the trainer is what it knew when the pool was made.
    """

    def __init__(self, function: Callable[..., Any], *, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self._numbers = call_numbers()
        self._processes = WorkerProcesses(
            fork_server(functools.partial(work, function=function)),
            max_reply_bytes=MAX_REPLY_BYTES,
        )
        self._close = weakref.finalize(self, self._processes.end)

    def close(self) -> None:
        """End all processes; this also happens when nobody needs the pool any more."""
        self._close()

    def call(self, kwargs: Mapping[str, Any]) -> Grade:
        try:
            content = Payload.of(dict(kwargs), "what the reward function is given").content
        except ValueError as error:
            return InfraError(str(error), is_final=True)
        losses: list[str] = []
        num_before = num_oom_kills()
        while len(losses) <= MAX_RETRIES:
            try:
                return self._call_once(content)
            except TimeoutError:
                text = f"the reward function took longer than {self.timeout_seconds} s"
                return InfraError(text, is_timeout=True)
            except LostWorkerError as loss:
                losses.append(str(loss))
        hint = "; the kernel killed processes when memory ran out" * (num_oom_kills() > num_before)
        return InfraError(
            f"{len(losses)} processes died or were stopped, one after another, while they "
            f"graded this response; the last: {losses[-1]}{hint}",
            is_final=True,
        )

    def _call_once(self, content: Octets) -> Grade:
        """The worker is killed unless it gives a grade."""
        worker = self._processes.take()
        deadline = time.monotonic() + self.timeout_seconds
        number = next(self._numbers)
        is_graded = False
        try:
            worker.line.begin_call(number, content, deadline=deadline)
            await_reply(worker, deadline)
            grade = unpacked(worker.line.end_call(number, deadline=deadline))
            is_graded = True
        except TimeoutError:
            raise
        except (OSError, EOFError) as error:
            raise LostWorkerError(f"process {worker.pid} ended ({error})") from error
        except (BrokenLineError, ValueError) as error:
            raise LostWorkerError(f"process {worker.pid} was killed: {error}") from error
        finally:
            if not is_graded:
                self._processes.kill(worker)
        self._processes.put_back(worker)
        return grade


def work(connection: socket.socket, function: Callable[..., Any]) -> None:
    """Serve calls until the trainer closes the line; it is numbered upwards, or broken."""
    os.setsid()  # what is sent to the trainer's terminal is not for it
    die_with_parent()
    torch.set_num_threads(1)  # thread pools do not survive a fork
    loop = asyncio.new_event_loop()
    line = Line(connection, max_bytes=MAX_CALL_BYTES)
    last = -1
    while (call := line.receive()) is not None and call.number > last:
        last = call.number
        grade = grade_of(function, Payload(call.body).unpickle(), loop)
        sys.stdout.flush()
        line.send(call.number, packed(grade))


def grade_of(
    function: Callable[..., Any], kwargs: dict[str, Any], loop: asyncio.AbstractEventLoop
) -> Grade:
    """Call the function; whatever it does short of killing the process, a grade comes back, and
    only to the process that was asked."""
    try:
        with forks_end_here():
            result = function(**kwargs)
            if is_async(function):
                result = loop.run_until_complete(result)
            return as_grade(result)
    except BaseException as error:
        return infra_error_of(error, "the reward function")


_PLAIN = {str: str.__str__, bool: bool, int: int.__int__, float: float.__float__}
_KINDS = {kind.__name__: kind for kind in (Score, Abstain, InfraError)}


def packed(grade: Grade) -> bytes:
    """The grade as plain data; if that is not possible, the reason in its place."""
    try:
        message = codec.dumps([type(grade).__name__, as_plain(vars(grade))], "the grade")
        if len(message) <= MAX_REPLY_BYTES:
            return message
        reason = f"it has {len(message)} bytes, and the limit is {MAX_REPLY_BYTES}"
    except (ValueError, RecursionError) as error:
        reason = str(error)
    text = f"what the reward function reported cannot be sent to the trainer: {reason}"
    return codec.dumps([InfraError.__name__, {"reason": text}], "an error")


def as_plain(value: Any) -> Any:
    """Without the subclasses of plain types that functions report: counters, named tuples, enums of
    numbers."""
    if isinstance(value, Mapping):
        return {as_plain(key): as_plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return (list if isinstance(value, list) else tuple)(map(as_plain, value))
    if type(value) not in _PLAIN and not isinstance(value, np.generic):
        for kind, base in _PLAIN.items():
            if isinstance(value, kind):
                return base(value)
    return value


def unpacked(message: bytes | bytearray) -> Grade:
    """The grade that `packed` was given; a ValueError for anything else."""
    try:
        kind, fields = codec.loads(message)
        grade = _KINDS[kind](**fields)
        is_sound = (
            isinstance(grade.value, float | int)
            and isinstance(grade.extras, dict)
            and isinstance(grade.token_values, np.ndarray | None)
            if isinstance(grade, Score)
            else isinstance(grade.reason, str)
        )
    except (LookupError, TypeError) as error:
        raise ValueError(f"a reply that is no grade: {error!r}") from error
    if not is_sound:
        raise ValueError(f"a reply that is no grade: {kind} with {fields!r:.200}")
    return checked(grade)


def is_attached() -> bool:
    """Whether somebody has connected this program to a cluster; Ray is not loaded to find out."""
    return "ray" in sys.modules and require("ray").is_initialized()


class RayWorker:
    """What runs in the actor."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._loop = asyncio.new_event_loop()

    def ready(self) -> bool:
        return True

    def grade(self, kwargs: dict[str, Any]) -> Grade:
        return grade_of(self._function, kwargs, self._loop)


class RayWorkerPool:
    """`call(kwargs)` is the grade that `function(**kwargs)` means, found in an actor."""

    def __init__(self, function: Callable[..., Any], *, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self._function = function
        self._ray: Any = require("ray", extra="ray")
        self._idle: list[Any] = []
        self._lock = threading.Lock()

    def close(self) -> None:
        for actor in self._idle:
            self._ray.kill(actor)
        self._idle.clear()

    def call(self, kwargs: Mapping[str, Any]) -> Grade:
        for _ in range(1 + MAX_RETRIES):
            grade = self._call_once(dict(kwargs))
            if grade is not None:
                return grade
        return InfraError(
            f"{1 + MAX_RETRIES} actors died one after another while they graded this response",
            is_final=True,
        )

    def _call_once(self, kwargs: dict[str, Any]) -> Grade | None:
        """None if the actor died."""
        errors = self._ray.exceptions
        actor = self._take()
        try:
            self._ray.get(actor.ready.remote(), timeout=START_SECONDS)
            grade = self._ray.get(actor.grade.remote(kwargs), timeout=self.timeout_seconds)
        except errors.GetTimeoutError:
            self._ray.kill(actor)
            text = f"the reward function took longer than {self.timeout_seconds} s"
            return InfraError(text, is_timeout=True)
        except errors.RayActorError:
            return None
        with self._lock:
            self._idle.append(actor)
        return grade

    def _take(self) -> Any:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return self._ray.remote(num_cpus=0)(RayWorker).remote(self._function)

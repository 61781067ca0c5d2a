"""Calls a reward function in processes that can be killed.

    trainer ---- control socket ----> fork server   forked once, has one thread, runs no user code
       |                                 |  forks and ends keepers
       |                               keeper       one for each worker, ends all that it leaves
       |                                 |
       +---- a line for each ------> worker         read arguments, call the function, send a grade

A call that takes too long ends with its worker killed, inside C code or not. A worker that dies
under a call (out of memory, a crash in C, somebody's `kill`), is stopped by a signal, or says
something else than the reply to its call, tells nothing about the response: it is killed and the
call is repeated on a new worker, a few times. Either way the next call gets a worker.

Arguments go out as the trainer pickles them; what comes back is plain data (`codec`), so nothing
that runs in a worker becomes code in the trainer. A fork that a function makes never replies.

The fork server is a copy of the trainer from the moment the reward manager was made, and workers
are copies of it: they start in milliseconds, however large the trainer has grown, and take any
function, closures too. A keeper adopts what the processes below it leave behind, daemons with a
session of their own too, and kills it when its worker ends. When the trainer is gone the fork
server reads the end of its socket and ends the keepers; when the fork server is gone, the kernel
tells them.

`RayWorkerPool` does the same with actors on all machines of a Ray cluster; they take any function
that Ray can serialize.
"""

import asyncio
import os
import signal
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch

from verl.protocol import codec
from verl.protocol.trajectory import Abstain, Grade, InfraError, Score
from verl.single_controller.local.payload import Payload
from verl.utils.import_utils import require
from verl.utils.line import BrokenLineError, Line, Octets, call_numbers, close_in_forks
from verl.utils.processes import (
    adopt_orphans,
    die_with_parent,
    end_descendants,
    forks_end_here,
    has_children,
    is_stopped,
)
from verl.workers.reward_manager.grader import as_grade, checked, infra_error_of, is_async

MAX_RETRIES = 3
CONTROL_SECONDS = 10.0
"""The fork server replies in milliseconds; longer means that it was stopped."""

PROBE_SECONDS = 5.0
"""How often to check whether a worker that does not reply was stopped by a signal."""

START_SECONDS = 120.0
"""Until an actor replies for the first time; it has to import the package."""

MAX_CALL_BYTES = 1 << 40
MAX_REPLY_BYTES = 64 << 20

CONTROL = struct.Struct("QQ")
"""Number of the request, and START or the pid of a worker to kill; the reply has the number and the
pid of the worker."""

START = 0


class WorkerPool:
    """`call(kwargs)` is the grade that `function(**kwargs)` means, found in another process.

    Callers keep to as many calls at a time as they want processes. Workers start when needed and
    stay. What they know of the trainer is what it knew when the pool was made.
    """

    def __init__(self, function: Callable[..., Any], *, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self._numbers = call_numbers()
        self._processes = WorkerProcesses(function)
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
        while len(losses) <= MAX_RETRIES:
            try:
                return self._call_once(content)
            except TimeoutError:
                text = f"the reward function took longer than {self.timeout_seconds} s"
                return InfraError(text, is_timeout=True)
            except LostWorkerError as loss:
                losses.append(str(loss))
        return InfraError(
            f"{len(losses)} processes died or were stopped, one after another, while they "
            f"graded this response; the last: {losses[-1]}",
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


class LostWorkerError(RuntimeError):
    """The worker is gone and has not told anything about the response."""


@dataclass(frozen=True)
class WorkerProcess:
    pid: int
    line: Line


def await_reply(worker: WorkerProcess, deadline: float) -> None:
    """Wait until it says something, or has ended; a `LostWorkerError` once it is found stopped
    twice."""
    was_stopped = False
    while (remaining := deadline - time.monotonic()) > 0:
        if worker.line.has_bytes(min(PROBE_SECONDS, remaining)):
            return
        if was_stopped and is_stopped(worker.pid):
            raise LostWorkerError(f"process {worker.pid} was stopped by a signal")
        was_stopped = is_stopped(worker.pid)
    raise TimeoutError


class WorkerProcesses:
    """The fork server and its workers, as the trainer sees them; a lost fork server is replaced."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._numbers = call_numbers()
        self._idle: list[WorkerProcess] = []
        self._server_pid, self._control = self._start_fork_server()

    def take(self) -> WorkerProcess:
        with self._lock:
            return self._idle.pop() if self._idle else self._start_worker()

    def put_back(self, worker: WorkerProcess) -> None:
        with self._lock:
            self._idle.append(worker)

    def kill(self, worker: WorkerProcess) -> None:
        """End it and whatever it started; without a fork server it is dead already."""
        worker.line.close()
        with self._lock:
            try:
                self._request(worker.pid)
            except OSError:
                self._control.close()  # a late reply would be taken for another one's

    def end(self) -> None:
        if os.getpid() != self._owner:  # a fork of the trainer has no say in this
            return
        for worker in self._idle:
            worker.line.close()
        self._end_fork_server()

    def _start_fork_server(self) -> tuple[int, socket.socket]:
        pid, control = start_fork_server(self._function)
        close_in_forks(control)
        control.settimeout(CONTROL_SECONDS)
        return pid, control

    def _start_worker(self) -> WorkerProcess:
        try:
            return self._new_worker()
        except OSError:  # the fork server was killed or stopped
            self._end_fork_server()
            self._server_pid, self._control = self._start_fork_server()
            return self._new_worker()

    def _new_worker(self) -> WorkerProcess:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                pid = self._request(START, theirs.fileno())
        except OSError:
            ours.close()
            raise
        return WorkerProcess(pid, Line(ours, max_bytes=MAX_REPLY_BYTES))

    def _request(self, what: int, *descriptors: int) -> int:
        """The pid in the fork server's reply; OSError if there is none, or another's."""
        number = next(self._numbers)
        socket.send_fds(self._control, [CONTROL.pack(number, what)], descriptors)
        reply = self._control.recv(CONTROL.size)
        if len(reply) != CONTROL.size or CONTROL.unpack(reply)[0] != number:
            raise ConnectionError("the fork server of the reward workers has ended")
        return CONTROL.unpack(reply)[1]

    def _end_fork_server(self) -> None:
        self._control.close()
        for _ in range(100):  # it ends its keepers first
            pid, _ = os.waitpid(self._server_pid, os.WNOHANG)
            if pid:
                return
            time.sleep(0.01)
        os.kill(self._server_pid, signal.SIGKILL)
        os.waitpid(self._server_pid, 0)  # it was killed, so this returns


def start_fork_server(function: Callable[..., Any]) -> tuple[int, socket.socket]:
    """Its process id and our end of the control socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # or the copy would print it too
    pid = os.fork()
    if pid == 0:
        ours.close()
        _run_and_exit(lambda: ForkServer(theirs, function).serve())
    theirs.close()
    return pid, ours


class ForkServer:
    """Forks and ends keepers on request, until the control socket is closed."""

    def __init__(self, control: socket.socket, function: Callable[..., Any]) -> None:
        self._control = control
        self._function = function
        self._keepers: dict[int, int] = {}  # by the pid of the worker

    def serve(self) -> None:
        os.setsid()  # Ctrl-C is for the trainer
        adopt_orphans()  # of a keeper that somebody killed
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        while True:
            message, descriptors, _, _ = socket.recv_fds(self._control, CONTROL.size, 1)
            if len(message) < CONTROL.size:
                break
            number, what = CONTROL.unpack(message)
            pid = self._fork(descriptors[0]) if what == START else self._kill(what)
            self._control.sendall(CONTROL.pack(number, pid))
        for keeper in self._keepers.values():
            os.kill(keeper, signal.SIGTERM)
        for keeper in self._keepers.values():
            os.waitpid(keeper, 0)  # what it keeps has a deadline
        end_descendants()

    def _fork(self, descriptor: int) -> int:
        reader, writer = os.pipe()
        server, keeper = os.getpid(), os.fork()
        if keeper == 0:
            self._control.close()
            os.close(reader)
            connection = socket.socket(fileno=descriptor)
            _run_and_exit(lambda: keep(connection, self._function, writer, server))
        os.close(writer)
        os.close(descriptor)
        with open(reader, "rb") as stream:
            pid = int.from_bytes(stream.read(), "big")
        self._keepers[pid] = keeper
        return pid

    def _kill(self, pid: int) -> int:
        keeper = self._keepers.pop(pid, None)
        if keeper is not None:  # nobody else waits for it, so the number is still its own
            os.kill(keeper, signal.SIGTERM)
            os.waitpid(keeper, 0)  # what it keeps has a deadline
        return pid


def keep(
    connection: socket.socket, function: Callable[..., Any], pid_pipe: int, server: int
) -> None:
    """Start a worker and tell its pid; when it ends, or SIGTERM comes, end all that is below."""
    signals = (signal.SIGTERM, signal.SIGCHLD)
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    die_with_parent(signal.SIGTERM)
    if os.getppid() != server:  # it has died before we asked
        return
    adopt_orphans()
    worker = os.fork()
    if worker == 0:
        os.close(pid_pipe)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        _run_and_exit(lambda: work(connection, function))
    connection.close()
    os.write(pid_pipe, worker.to_bytes(8, "big"))
    os.close(pid_pipe)
    while signal.sigwait(signals) == signal.SIGCHLD and is_running(worker):
        has_children()  # collects
    end_descendants()


def is_running(child: int) -> bool:
    try:
        return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:  # collected
        return False


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


def _run_and_exit(task: Callable[[], None]) -> NoReturn:
    """End without the exit handlers and buffers that were copied from the trainer."""
    code = 1
    try:
        task()
        code = 0
    finally:
        os._exit(code)


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

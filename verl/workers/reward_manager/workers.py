"""Calls a reward function in processes that can be killed.

    trainer ---- control socket ----> fork server   forked once, has one thread, runs no user code
       |                                 |  forks and kills workers, one after another
       +---- a socket for each ----> worker         read arguments, call the function, send a grade

A call that takes too long ends with its worker killed, inside C code or not. A worker that dies
under a call (out of memory, a crash in C, somebody's `kill`), or is stopped by a signal, tells
nothing about the response: the call is repeated on a new worker, a few times. Either way the next
call gets a worker.

The fork server is a copy of the trainer from the moment the reward manager was made, and workers
are copies of it: they start in milliseconds, however large the trainer has grown, and take any
function, closures too. When the trainer is gone the fork server reads the end of its socket, kills
every worker with all that it started, and ends.

`RayWorkerPool` does the same with actors on all machines of a Ray cluster; they take any function
that Ray can serialize.
"""

import asyncio
import ctypes
import os
import signal
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any, NoReturn

import torch

from verl.protocol.trajectory import Grade, InfraError
from verl.single_controller.base.process_probe import is_stopped
from verl.single_controller.local.payload import Payload
from verl.utils.import_utils import require
from verl.workers.reward_manager.grader import as_grade, infra_error_of, is_async

MAX_RETRIES = 3
CONTROL_SECONDS = 10.0
"""The fork server replies in milliseconds; longer means that it was stopped."""

PROBE_SECONDS = 5.0
"""How often to check whether a worker that does not reply was stopped by a signal."""

START_SECONDS = 120.0
"""Until an actor replies for the first time; it has to import the package."""

NUMBER = struct.Struct("q")
START = 0
"""Sent to the fork server with a worker's end of its socket; any other number is a pid to kill."""

PR_SET_PDEATHSIG = 1


class WorkerPool:
    """`call(kwargs)` is the grade that `function(**kwargs)` means, found in another process.

    Callers keep to as many calls at a time as they want processes. Workers start when needed and
    stay. What they know of the trainer is what it knew when the pool was made.
    """

    def __init__(self, function: Callable[..., Any], *, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
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
        for _ in range(1 + MAX_RETRIES):
            grade = self._call_once(content)
            if grade is not None:
                return grade
        return InfraError(
            f"{1 + MAX_RETRIES} processes died or were stopped, one after another, while they "
            "graded this response",
            is_final=True,
        )

    def _call_once(self, content: bytes | memoryview) -> Grade | None:
        """None if the worker died or was stopped."""
        worker = self._processes.take()
        reply = None
        try:
            worker.connection.settimeout(self.timeout_seconds)
            send(worker.connection, content)
            if has_reply(worker, self.timeout_seconds):
                reply = receive(worker.connection)
        except TimeoutError:
            text = f"the reward function took longer than {self.timeout_seconds} s"
            return InfraError(text, is_timeout=True)
        except (OSError, EOFError):
            return None
        finally:
            if reply is None:
                self._processes.kill(worker)
        if reply is None:
            return None
        self._processes.put_back(worker)
        return Payload(reply).open()


@dataclass(frozen=True)
class WorkerProcess:
    pid: int
    connection: socket.socket


def has_reply(worker: WorkerProcess, timeout_seconds: float) -> bool:
    """Whether it replies, if only by ending; False once it is found stopped twice.

    Raises `TimeoutError` when the time is over.
    """
    give_up_at = time.monotonic() + timeout_seconds
    was_stopped = False
    while (remaining := give_up_at - time.monotonic()) > 0:
        if wait([worker.connection], min(PROBE_SECONDS, remaining)):
            return True
        if was_stopped and is_stopped(worker.pid):
            return False
        was_stopped = is_stopped(worker.pid)
    raise TimeoutError


class WorkerProcesses:
    """The fork server and its workers, as the trainer sees them; a lost fork server is replaced."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._owner = os.getpid()
        self._lock = threading.Lock()
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
        worker.connection.close()
        with self._lock, suppress(OSError):
            self._control.sendall(NUMBER.pack(worker.pid))
            self._control.recv(NUMBER.size)

    def end(self) -> None:
        if os.getpid() != self._owner:  # a fork of the trainer has no say in this
            return
        for worker in self._idle:
            worker.connection.close()
        self._end_fork_server()

    def _start_fork_server(self) -> tuple[int, socket.socket]:
        pid, control = start_fork_server(self._function)
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
                socket.send_fds(self._control, [NUMBER.pack(START)], [theirs.fileno()])
                reply = self._control.recv(NUMBER.size)
            if len(reply) < NUMBER.size:
                raise ConnectionError("the fork server of the reward workers has ended")
        except OSError:
            ours.close()
            raise
        (pid,) = NUMBER.unpack(reply)
        return WorkerProcess(pid, ours)

    def _end_fork_server(self) -> None:
        self._control.close()
        for _ in range(100):  # it kills its workers first
            pid, _ = os.waitpid(self._server_pid, os.WNOHANG)
            if pid:
                return
            time.sleep(0.01)
        os.kill(self._server_pid, signal.SIGKILL)
        os.waitpid(self._server_pid, 0)  # it was killed, so this returns


def start_fork_server(function: Callable[..., Any]) -> tuple[int, socket.socket]:
    """Its process id and our end of the control socket."""
    ours, theirs = socket.socketpair()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # or the copy would print it too
    pid = os.fork()
    if pid == 0:
        ours.close()
        _run_and_exit(lambda: ForkServer(theirs, function).serve())
    theirs.close()
    return pid, ours


class ForkServer:
    """Forks and kills workers on request, until the control socket is closed."""

    def __init__(self, control: socket.socket, function: Callable[..., Any]) -> None:
        self._control = control
        self._function = function
        self._workers: set[int] = set()

    def serve(self) -> None:
        os.setsid()  # Ctrl-C is for the trainer
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        while True:
            message, descriptors, _, _ = socket.recv_fds(self._control, NUMBER.size, 1)
            if len(message) < NUMBER.size:
                break
            (number,) = NUMBER.unpack(message)
            pid = self._fork(descriptors[0]) if number == START else self._kill(number)
            self._control.sendall(NUMBER.pack(pid))
        for pid in list(self._workers):
            self._kill(pid)

    def _fork(self, descriptor: int) -> int:
        pid = os.fork()
        if pid == 0:
            self._control.close()
            _run_and_exit(lambda: work(socket.socket(fileno=descriptor), self._function))
        os.close(descriptor)
        self._workers.add(pid)
        return pid

    def _kill(self, pid: int) -> int:
        if pid in self._workers:  # nobody else waits for it, so the number is still its own
            self._workers.remove(pid)
            for kill in (os.killpg, os.kill):  # it has no group yet if it just started
                with suppress(ProcessLookupError):
                    kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)  # it was killed, so this returns
        return pid


def work(connection: socket.socket, function: Callable[..., Any]) -> None:
    """Serve calls until the trainer closes the socket."""
    os.setsid()  # a group of its own, so that processes it starts die with it
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)  # thread pools do not survive a fork
    loop = asyncio.new_event_loop()
    while (content := receive(connection)) is not None:
        grade = grade_of(function, Payload(content).open(), loop)
        sys.stdout.flush()
        send(connection, packed(grade))


def grade_of(
    function: Callable[..., Any], kwargs: dict[str, Any], loop: asyncio.AbstractEventLoop
) -> Grade:
    """Call the function; whatever it does short of killing the process, a grade comes back."""
    try:
        result = function(**kwargs)
        if is_async(function):
            result = loop.run_until_complete(result)
    except BaseException as error:
        return infra_error_of(error, "the reward function")
    return as_grade(result)


def packed(grade: Grade) -> bytes | memoryview:
    try:
        return Payload.of(grade, "what the reward function reported").content
    except ValueError as error:
        return Payload.of(InfraError(str(error)), "an error").content


def send(connection: socket.socket, content: bytes | memoryview) -> None:
    """A message is its length and its bytes."""
    connection.sendall(NUMBER.pack(len(content)))
    connection.sendall(content)


def receive(connection: socket.socket) -> bytes | None:
    """The next message; None when the other side has closed the socket between two of them."""
    header = _read(connection, NUMBER.size)
    if not header:
        return None
    (length,) = NUMBER.unpack(header)
    return _read(connection, length)


def _read(connection: socket.socket, length: int) -> bytes:
    parts = bytearray()
    while len(parts) < length:
        part = connection.recv(length - len(parts))
        if not part:
            if parts:
                raise EOFError("the other side ended in the middle of a message")
            break
        parts += part
    return bytes(parts)


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

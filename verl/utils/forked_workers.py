"""Worker processes that can be killed at any time, with all that they have started.

    owner ------- control socket ----> fork server   one thread, runs no user code
       |                                 |  forks and ends keepers
       |                               keeper       one for each worker, ends all that it leaves
       |                                 |
       +---- a line for each ------> worker         calls `work` with its end of the line

The fork server is a copy of its owner (`fork_server`) or a fresh interpreter
(`interpreter_server`); workers are copies of it and start in milliseconds. A keeper adopts what the
processes below it leave behind, daemons with a session of their own too, and kills it when its
worker ends. When the owner is gone the fork server reads the end of its socket and ends the
keepers; when the fork server is gone, the kernel tells them.

What is said on the lines is the owner's business. Only the standard library is imported, for
interpreters that have nothing else.
"""

import importlib
import json
import os
import signal
import socket
import struct
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from verl.utils.line import Line, call_numbers, close_in_forks
from verl.utils.processes import (
    adopt_orphans,
    die_with_parent,
    end_descendants,
    has_children,
    is_stopped,
)

CONTROL_SECONDS = 10.0
"""The fork server replies in milliseconds; longer means that it was stopped."""

PROBE_SECONDS = 5.0
"""How often to check whether a worker that does not reply was stopped by a signal."""

CONTROL = struct.Struct("QQ")
"""Number of the request, and START or the pid of a worker to kill; the reply has the number and the
pid of the worker."""

START = 0
BOOT = """
import importlib.util, json, sys
folder, path, work, modules = sys.argv[1:]
sys.path[:0] = json.loads(path)
spec = importlib.util.spec_from_file_location(
    "verl", folder + "/__init__.py", submodule_search_locations=[folder]
)
sys.modules["verl"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["verl"])
from verl.utils.forked_workers import serve_interpreter
serve_interpreter(work, json.loads(modules))
"""
"""Another interpreter finds this package in its folder, and nothing else that lies beside it."""

CONTROL_DESCRIPTOR = 3

Work = Callable[[socket.socket], None]
StartServer = Callable[[], tuple[int, socket.socket]]
"""Start a fork server; its process id and our end of the control socket."""


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
    """The fork server and its workers, as the owner sees them; a lost fork server is replaced."""

    def __init__(
        self,
        launch: StartServer,
        *,
        max_reply_bytes: int,
        control_seconds: float = CONTROL_SECONDS,
    ) -> None:
        self._launch = launch
        self._max_reply_bytes = max_reply_bytes
        self._control_seconds = control_seconds
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._numbers = call_numbers()
        self._idle: list[WorkerProcess] = []
        self._has_ended = False
        self._server_pid, self._control = self._start_fork_server()

    def take(self) -> WorkerProcess:
        with self._lock:
            if self._has_ended:
                raise LostWorkerError("the processes have been ended")
            return self._idle.pop() if self._idle else self._start_worker()

    def put_back(self, worker: WorkerProcess) -> None:
        with self._lock:
            if self._has_ended:
                worker.line.close()
            else:
                self._idle.append(worker)

    def kill(self, worker: WorkerProcess) -> None:
        """End it and whatever it started; without a fork server it is dead already."""
        worker.line.close()
        self.stop(worker)

    def stop(self, worker: WorkerProcess) -> None:
        """`kill` while another thread waits for its reply, which then ends with EOFError."""
        with self._lock:
            try:
                self._request(worker.pid)
            except OSError:
                self._control.close()  # a late reply would be taken for another one's

    def end(self) -> None:
        if os.getpid() != self._owner:  # a fork of the owner has no say in this
            return
        with self._lock:
            self._has_ended = True
            for worker in self._idle:
                worker.line.close()
            self._end_fork_server()

    def _start_fork_server(self) -> tuple[int, socket.socket]:
        pid, control = self._launch()
        close_in_forks(control)
        control.settimeout(self._control_seconds)
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
        return WorkerProcess(pid, Line(ours, max_bytes=self._max_reply_bytes))

    def _request(self, what: int, *descriptors: int) -> int:
        """The pid in the fork server's reply; OSError if there is none, or another's."""
        number = next(self._numbers)
        socket.send_fds(self._control, [CONTROL.pack(number, what)], descriptors)
        reply = self._control.recv(CONTROL.size)
        if len(reply) != CONTROL.size or CONTROL.unpack(reply)[0] != number:
            raise ConnectionError("the fork server of the workers has ended")
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


def fork_server(work: Work) -> StartServer:
    """A fork server that is a copy of this process, so `work` may be any function."""

    def start() -> tuple[int, socket.socket]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # or the copy would print it too
        pid = os.fork()
        if pid == 0:
            ours.close()
            _run_and_exit(lambda: ForkServer(theirs, work).serve())
        theirs.close()
        return pid, ours

    return start


def interpreter_server(
    work: str,
    *,
    python: str = sys.executable,
    path: Sequence[str],
    variables: Mapping[str, str],
    modules: Sequence[str] = (),
) -> StartServer:
    """A fork server that is a fresh interpreter: no memory, threads or locks of this process.

    `work` is "module:function", `path` the folders to import from before the interpreter's own,
    `modules` what it imports before it forks, where it can.
    """

    def start() -> tuple[int, socket.socket]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        folder = str(Path(__file__).parents[1])
        arguments = [folder, json.dumps(list(path)), work, json.dumps(list(modules))]
        with theirs:
            pid = os.posix_spawn(
                python,
                [python, "-c", BOOT, *arguments],
                dict(variables),
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, theirs.fileno(), CONTROL_DESCRIPTOR),
                ],
            )
        return pid, ours

    return start


def serve_interpreter(work: str, modules: Sequence[str]) -> None:
    """What the fresh interpreter runs, until its owner closes the control socket."""
    control = socket.socket(fileno=CONTROL_DESCRIPTOR)
    control.set_inheritable(False)
    module, _, name = work.partition(":")
    function = getattr(importlib.import_module(module), name)
    for wanted in modules:
        with suppress(Exception):  # the worker imports it too, and reports what is wrong
            importlib.import_module(wanted)
    ForkServer(control, function).serve()


class ForkServer:
    """Forks and ends keepers on request, until the control socket is closed."""

    def __init__(self, control: socket.socket, work: Work) -> None:
        self._control = control
        self._work = work
        self._keepers: dict[int, int] = {}  # by the pid of the worker

    def serve(self) -> None:
        os.setsid()  # Ctrl-C is for the owner
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
        server, keeper = os.getpid(), _fork()
        if keeper == 0:
            self._control.close()
            os.close(reader)
            connection = socket.socket(fileno=descriptor)
            _run_and_exit(lambda: keep(connection, self._work, writer, server))
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


def keep(connection: socket.socket, work: Work, pid_pipe: int, server: int) -> None:
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
        _run_and_exit(lambda: work(connection))
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


def _fork() -> int:
    with warnings.catch_warnings():
        # The other threads are allocators', which have handlers for a fork.
        warnings.filterwarnings("ignore", "This process", DeprecationWarning)
        return os.fork()


def _run_and_exit(task: Callable[[], None]) -> NoReturn:
    """End without the exit handlers and buffers that were copied from the owner."""
    code = 1
    try:
        task()
        code = 0
    finally:
        os._exit(code)

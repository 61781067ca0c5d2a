"""A process that forks ranks, so that their imports are paid once per driver.

    driver ------- control socket -------> fork server    one thread, runs no torch operation
      |   modules, a line's end, streams      | imports the modules, forks, reports exit codes
      +------------- line ---------------> rank

The server is a fresh interpreter, not a copy of the driver: what the driver has in memory, its
threads and its locks are not inherited. It imports the modules of each worker class before it forks
the first rank of that class. It ends when the driver does, however that ends, and the kernel kills
its ranks with it. Variables that libraries read while they are imported decide which server serves
a rank; all other variables, the working directory and the output streams are the driver's at the
moment a rank starts.

Where there is an accelerator or no pidfd (Linux 5.3) ranks are spawned instead: looking for a GPU,
which imports do, already makes a fork unable to use it.
"""

import atexit
import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing import connection
from multiprocessing.util import Finalize
from typing import Any, NoReturn

import numpy as np

from verl.single_controller.local.rank import run_rank
from verl.utils import environment
from verl.utils.device import is_cuda_available, is_npu_available
from verl.utils.line import call_numbers, close_in_forks
from verl.utils.processes import die_with_parent, reap

NUMBER = struct.Struct("i")
ANSWER = struct.Struct("Qi")
"""The number of the request, and the pid of the rank."""

MAX_REQUEST_BYTES = 1 << 17
START_SECONDS = 120.0
END_SECONDS = 5.0
ATTEMPTS = 3
BOOT = """
import gc, json, sys
gc.disable()
sys.path[:] = json.loads(sys.argv[1])
from verl.single_controller.local.fork_server import main
main(int(sys.argv[2]), int(sys.argv[3]))
"""
IMPORT_PREFIXES = (
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "ONEDNN_", "TORCH", "PYTORCH_"),
    *("LD_", "PYTHON", "CUDA_", "HF_", "VERL_"),
)
"""Variables that may be read during an import."""
OF_A_RUN = "VERL_FILE_LOGGER_"
"""Read by a run and by no import: a process that makes several runs sets them for each."""


# ---- driver --------------------------------------------------------------------------------------


class ForkedProcess:
    """A rank as the driver sees it: what is used here of `multiprocessing.Process`."""

    def __init__(self, pid: int, parent_pid: int, status: int) -> None:
        self.pid = pid
        self.parent_pid = parent_pid
        self.sentinel = status
        self._exitcode: int | None = None
        self._lock = threading.Lock()

    def __del__(self) -> None:
        os.close(self.sentinel)

    @property
    def exitcode(self) -> int | None:
        with self._lock:
            if self._exitcode is None and connection.wait([self.sentinel], 0):
                content = os.read(self.sentinel, NUMBER.size)
                # Without a report the server has ended, and the kernel has killed its ranks.
                self._exitcode = NUMBER.unpack(content)[0] if content else -signal.SIGKILL
            return self._exitcode

    def is_alive(self) -> bool:
        return self.exitcode is None

    def join(self, timeout: float) -> None:
        if self._exitcode is None:
            connection.wait([self.sentinel], timeout)


@cache
def is_available() -> bool:
    if sys.platform != "linux" or is_cuda_available or is_npu_available:
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


def fork_rank(theirs: socket.socket, modules: Sequence[str]) -> ForkedProcess:
    """Start a rank that has imported `modules` and serves its end of a line."""
    variables = sorted(environment.all_variables().items())
    read = [
        (name, value)
        for name, value in variables
        if name.startswith(IMPORT_PREFIXES) and not name.startswith(OF_A_RUN)
    ]
    key = (os.getpid(), *read)  # a fork of the driver needs its own
    with _lock:
        for attempts_left in range(ATTEMPTS - 1, -1, -1):
            if key in _servers and not _servers[key].is_alive():
                _servers.pop(key).end()
            if key not in _servers:
                _servers[key] = ForkServer()
            try:
                return _servers[key].fork(theirs.fileno(), modules)
            except ForkServerKilled:
                if not attempts_left:
                    raise
    raise AssertionError("the loop returns or raises")


class ForkServerKilled(ConnectionError):
    """A signal ended the fork server before it had forked a rank."""


class ForkServer:
    """The server as the driver sees it."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(START_SECONDS)
        close_in_forks(self._control)
        self._numbers = call_numbers()
        self._ranks: weakref.WeakSet[ForkedProcess] = weakref.WeakSet()
        descriptor = theirs.fileno()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, *_flags(), "-c", BOOT, json.dumps(sys.path)]
                + [str(descriptor), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=[descriptor],
                start_new_session=True,  # Ctrl-C and a signal to the driver's group are for it
            )

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def has_ranks(self) -> bool:
        return any(rank.is_alive() for rank in self._ranks)

    def fork(self, pipe: int, modules: Sequence[str]) -> ForkedProcess:
        status, theirs = os.pipe()
        number = next(self._numbers)
        request = {"number": number, "path": sys.path, "folder": os.getcwd()}
        request["modules"] = list(modules)
        try:
            descriptors = [pipe, theirs, 1, 2]
            socket.send_fds(self._control, [json.dumps(request).encode()], descriptors)
            answer = self._control.recv(ANSWER.size)
        except ConnectionError:
            answer = b""
        except OSError:
            os.close(status)
            self._process.kill()  # a late answer would be taken for another one's
            raise
        finally:
            os.close(theirs)
        if not answer:
            os.close(status)
            code = self._process.wait(timeout=END_SECONDS)
            if code < 0:
                name = signal.Signals(-code).name
                raise ForkServerKilled(f"the fork server of the ranks was killed by {name}")
            raise RuntimeError(
                f"the fork server of the ranks ended while it imported {list(modules)}; "
                "what it wrote is in this program's error output"
            )
        answered, pid = ANSWER.unpack(answer)
        assert answered == number, "an answer to another request"
        rank = ForkedProcess(pid, self._process.pid, status)
        self._ranks.add(rank)
        return rank

    def end(self) -> None:
        self._control.close()
        reap(self._process, END_SECONDS)


_servers: dict[tuple[Any, ...], ForkServer] = {}
_lock = threading.Lock()
_num_keepers = 0


@contextmanager
def keeping_servers() -> Iterator[None]:
    """Keep servers for the next ranks while the context lasts; after the last one of this process
    has ended, so do all servers without ranks."""
    global _num_keepers
    with _lock:
        _num_keepers += 1
    try:
        yield
    finally:
        with _lock:
            _num_keepers -= 1
            servers = [] if _num_keepers else list(_servers.items())
            for key, server in servers:
                if key[0] == os.getpid() and not server.has_ranks():
                    _servers.pop(key).end()


def _end_servers() -> None:
    for key, server in _servers.items():
        if key[0] == os.getpid():
            server.end()
    _servers.clear()


Finalize(None, _end_servers, exitpriority=0)  # after the ranks, which have a higher priority


def _flags() -> list[str]:
    """The interpreter's own options, as `multiprocessing` passes them on."""
    return subprocess._args_from_interpreter_flags()  # pyright: ignore[reportAttributeAccessIssue]


# ---- server --------------------------------------------------------------------------------------


def main(control: int, driver_pid: int) -> None:
    """Fork ranks until the driver ends."""
    pipe = serve(socket.socket(fileno=control), driver_pid)
    if pipe is not None:
        _run_and_exit(pipe)


def _run_and_exit(pipe: socket.socket) -> NoReturn:
    """Be a rank, then run the exit handlers and leave the inherited objects to the kernel."""
    code = 1
    try:
        run_rank(pipe)
        code = 0
    except SystemExit as leave:
        code = leave.code if isinstance(leave.code, int) else int(leave.code is not None)
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def serve(control: socket.socket, driver_pid: int) -> socket.socket | None:
    """None in the server when its driver is gone; in a rank, its end of the line."""
    driver = os.pidfd_open(driver_pid)
    if os.getppid() != driver_pid:
        return None
    ranks: dict[int, tuple[int, int]] = {}  # pidfd -> pid, where to report its exit code
    poll = select.poll()
    for descriptor in (control.fileno(), driver):
        poll.register(descriptor, select.POLLIN)
    server_pid = os.getpid()
    while True:
        for descriptor, _ in poll.poll():
            if descriptor == driver:
                return None
            if descriptor in ranks:
                poll.unregister(descriptor)
                _report(descriptor, *ranks.pop(descriptor))
                continue
            message, descriptors, _, _ = socket.recv_fds(control, MAX_REQUEST_BYTES, 4)
            if not message:
                return None
            for received in descriptors:
                os.set_inheritable(received, False)
            pipe, status, *streams = descriptors
            request = json.loads(message)
            _import(request)
            pid = _fork()
            if pid == 0:
                control.close()
                for unused in (driver, status, *ranks, *(report for _, report in ranks.values())):
                    os.close(unused)
                _become_rank(server_pid, streams)
                return socket.socket(fileno=pipe)
            pidfd = os.pidfd_open(pid)
            poll.register(pidfd, select.POLLIN)
            ranks[pidfd] = pid, status
            for passed_on in (pipe, *streams):
                os.close(passed_on)
            control.sendall(ANSWER.pack(request["number"], pid))


def _import(request: dict[str, Any]) -> None:
    sys.path[:] = request["path"]
    missing = [name for name in request["modules"] if name not in sys.modules]
    if not missing:
        return
    os.chdir(request["folder"])
    for name in missing:
        with suppress(Exception):  # the rank imports it too, and reports what is wrong
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # ranks share these pages until one of them writes


def _fork() -> int:
    with warnings.catch_warnings():
        # The other threads are allocators', which have handlers for a fork.
        warnings.filterwarnings("ignore", "This process", DeprecationWarning)
        return os.fork()


def _become_rank(server_pid: int, streams: Sequence[int]) -> None:
    gc.enable()  # the server, which imports and forks, does without
    die_with_parent()
    if os.getppid() != server_pid:  # it has died before we asked
        os._exit(1)
    for descriptor, stream in zip(streams, (1, 2), strict=True):
        os.dup2(descriptor, stream)
        os.close(descriptor)
    np.random.seed()  # Python's own generator does this by itself


def _report(pidfd: int, pid: int, status: int) -> None:
    _, code = os.waitpid(pid, 0)
    with suppress(BrokenPipeError):  # nobody asks any more
        os.write(status, NUMBER.pack(os.waitstatus_to_exitcode(code)))
    os.close(status)
    os.close(pidfd)

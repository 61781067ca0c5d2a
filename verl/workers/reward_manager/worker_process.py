"""The processes in which a reward function may hang, crash or be killed.

    trainer ----- control -----> nursery      forked once, has one thread, runs no user code
       |                           |  forks and kills workers, one after another
       +---- one line each ---> worker        read arguments, call the function, answer a grade

The nursery is a copy of the trainer from the moment the reward manager was made. Workers are copies
of the nursery: they start in milliseconds, however large the trainer has grown, and take any
function, closures too. When the trainer is gone the nursery reads the end of its line, kills every
worker with all that it started, and ends. `worker_pool` is the trainer's side.
"""

import asyncio
import ctypes
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

import torch

from verl.protocol.trajectory import Grade, InfraError
from verl.single_controller.local.payload import Payload
from verl.workers.reward_manager.grader import as_grade, infra_error_of, is_async

NUMBER = struct.Struct("q")
START = 0
"""Sent to the nursery with a worker's end of its line; any other number is a worker to kill."""

PR_SET_PDEATHSIG = 1


def start_nursery(function: Callable[..., Any]) -> tuple[int, socket.socket]:
    """Its process id and our end of the control line."""
    ours, theirs = socket.socketpair()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # or the copy would print it too
    pid = os.fork()
    if pid == 0:
        ours.close()
        _run_and_exit(lambda: Nursery(theirs, function).serve())
    theirs.close()
    return pid, ours


class Nursery:
    """Forks and kills workers as the control line says, until that ends."""

    def __init__(self, control: socket.socket, function: Callable[..., Any]) -> None:
        self._control = control
        self._function = function
        self._workers: set[int] = set()

    def serve(self) -> None:
        os.setsid()  # Ctrl-C is for the trainer
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        while True:
            message, lines, _, _ = socket.recv_fds(self._control, NUMBER.size, 1)
            if len(message) < NUMBER.size:
                break
            (number,) = NUMBER.unpack(message)
            pid = self._fork(lines[0]) if number == START else self._kill(number)
            self._control.sendall(NUMBER.pack(pid))
        for pid in list(self._workers):
            self._kill(pid)

    def _fork(self, line: int) -> int:
        pid = os.fork()
        if pid == 0:
            self._control.close()
            _run_and_exit(lambda: work(socket.socket(fileno=line), self._function))
        os.close(line)
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


def work(line: socket.socket, function: Callable[..., Any]) -> None:
    """Reply calls until the trainer closes the line."""
    os.setsid()  # a group of its own, so that processes it starts die with it
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)  # thread pools do not survive a fork
    loop = asyncio.new_event_loop()
    while (content := receive(line)) is not None:
        grade = grade_of(function, Payload(content).open(), loop)
        sys.stdout.flush()
        send(line, packed(grade))


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


def send(line: socket.socket, content: bytes | memoryview) -> None:
    """A message is its length and its bytes."""
    line.sendall(NUMBER.pack(len(content)))
    line.sendall(content)


def receive(line: socket.socket) -> bytes | None:
    """The next message; None when the other side has closed the line between two of them."""
    header = _read(line, NUMBER.size)
    if not header:
        return None
    (length,) = NUMBER.unpack(header)
    return _read(line, length)


def _read(line: socket.socket, length: int) -> bytes:
    parts = bytearray()
    while len(parts) < length:
        part = line.recv(length - len(parts))
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

"""Calls a reward function in worker processes that can be killed.

A call that takes too long ends with its worker killed, inside C code or not. A worker that dies
under a call (out of memory, a crash in C, somebody's `kill`), or is stopped by a signal, has said
nothing about the response: the call is made again on a new worker, a few times. Either way the next
call finds a worker.
"""

import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

from verl.protocol.trajectory import Grade, InfraError
from verl.single_controller.base.process_probe import is_stopped
from verl.single_controller.local.payload import Payload
from verl.workers.reward_manager.worker_process import (
    NUMBER,
    START,
    receive,
    send,
    start_nursery,
)

MAX_RETRIES = 3
CONTROL_SECONDS = 10.0
"""The nursery answers in milliseconds; longer means that it was stopped."""

PROBE_SECONDS = 5.0
"""How often to look whether a worker that does not answer was stopped by a signal."""


class WorkerPool:
    """`call(kwargs)` is the grade that `function(**kwargs)` means, found in another process.

    Callers keep to as many calls at a time as they want processes. Workers start when needed and
    stay. What they know of the trainer is what it knew when the pool was made.
    """

    def __init__(self, function: Callable[..., Any], *, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self._family = Family(function)
        self._close = weakref.finalize(self, self._family.end)

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
        worker = self._family.take()
        answer = None
        try:
            worker.line.settimeout(self.timeout_seconds)
            send(worker.line, content)
            if answers(worker, self.timeout_seconds):
                answer = receive(worker.line)
        except TimeoutError:
            text = f"the reward function took longer than {self.timeout_seconds} s"
            return InfraError(text, is_timeout=True)
        except (OSError, EOFError):
            return None
        finally:
            if answer is None:
                self._family.kill(worker)
        if answer is None:
            return None
        self._family.put_back(worker)
        return Payload(answer).open()


@dataclass(frozen=True)
class WorkerProcess:
    pid: int
    line: socket.socket


def answers(worker: WorkerProcess, timeout_seconds: float) -> bool:
    """Whether it says something, if only that it has ended; False once it is found stopped twice.

    Raises `TimeoutError` when the time is over.
    """
    give_up_at = time.monotonic() + timeout_seconds
    was_stopped = False
    while (remaining := give_up_at - time.monotonic()) > 0:
        if wait([worker.line], min(PROBE_SECONDS, remaining)):
            return True
        if was_stopped and is_stopped(worker.pid):
            return False
        was_stopped = is_stopped(worker.pid)
    raise TimeoutError


class Family:
    """The nursery and its workers, from the trainer's side. A nursery that is gone is replaced."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._idle: list[WorkerProcess] = []
        self._nursery, self._control = self._start_nursery()

    def take(self) -> WorkerProcess:
        with self._lock:
            return self._idle.pop() if self._idle else self._start_worker()

    def put_back(self, worker: WorkerProcess) -> None:
        with self._lock:
            self._idle.append(worker)

    def kill(self, worker: WorkerProcess) -> None:
        """End it and whatever it started; without a nursery it is dead already."""
        worker.line.close()
        with self._lock, suppress(OSError):
            self._control.sendall(NUMBER.pack(worker.pid))
            self._control.recv(NUMBER.size)

    def end(self) -> None:
        if os.getpid() != self._owner:  # a fork of the trainer has no say in this
            return
        for worker in self._idle:
            worker.line.close()
        self._end_nursery()

    def _start_nursery(self) -> tuple[int, socket.socket]:
        pid, control = start_nursery(self._function)
        control.settimeout(CONTROL_SECONDS)
        return pid, control

    def _start_worker(self) -> WorkerProcess:
        try:
            return self._new_worker()
        except OSError:  # the nursery was killed or stopped
            self._end_nursery()
            self._nursery, self._control = self._start_nursery()
            return self._new_worker()

    def _new_worker(self) -> WorkerProcess:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(self._control, [NUMBER.pack(START)], [theirs.fileno()])
                answer = self._control.recv(NUMBER.size)
            if len(answer) < NUMBER.size:
                raise ConnectionError("the nursery of the reward workers has ended")
        except OSError:
            ours.close()
            raise
        (pid,) = NUMBER.unpack(answer)
        return WorkerProcess(pid, ours)

    def _end_nursery(self) -> None:
        self._control.close()
        for _ in range(100):  # it kills its workers first
            pid, _ = os.waitpid(self._nursery, os.WNOHANG)
            if pid:
                return
            time.sleep(0.01)
        os.kill(self._nursery, signal.SIGKILL)
        os.waitpid(self._nursery, 0)  # it was killed, so this returns

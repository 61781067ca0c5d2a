"""The worker process: one rank that answers requests from its line, one at a time.

    main thread                            watching thread
      read a request                         waits for the driver's end
      run the method                         driver gone: kill this process group
      send the answer

The process leads a process group of its own, so Ctrl-C reaches only the driver, and ending the
group also ends what the worker started. The kernel is asked to kill the worker together with its
parent, which is the driver or its fork server; the watching thread does the same when the driver
ends, where the kernel cannot be asked.
"""

import json
import multiprocessing
import os
import signal
import socket
import threading
from dataclasses import asdict, replace
from multiprocessing import spawn
from multiprocessing.connection import wait
from typing import Any

from verl.single_controller.base.failures import Failure, Guard
from verl.single_controller.local.in_process import call_method
from verl.single_controller.local.payload import (
    CONSTRUCT,
    FAILURE,
    MAX_BYTES,
    VALUE,
    Payload,
    Request,
    Setup,
)
from verl.utils.environment import replace_variables
from verl.utils.line import BrokenLineError, Line
from verl.utils.processes import announce, die_with_parent, forks_end_here


def run_rank(connection: socket.socket) -> None:
    os.setpgid(0, 0)
    line = Line(connection, max_bytes=MAX_BYTES)
    first = line.receive()
    if first is None:  # the driver has ended
        return
    setup = Setup.of(first.body)
    die_with_driver(setup)
    replace_variables(setup.variables)
    if setup.preparation is not None:
        import_main_module(setup.preparation)
    line.send(first.number, json.dumps(asdict(announce())).encode())
    Rank(line, first.number).serve()


class Rank:
    """The worker object and the loop around it. `number` is that of the last frame that came."""

    def __init__(self, line: Line, number: int) -> None:
        self.line = line
        self.number = number
        self.worker: Any = None

    def serve(self) -> None:
        """Run each call once: one that is doubled, left out or late breaks the line."""
        while (call := self.line.receive()) is not None and call.body:
            self.number += 1
            if call.number != self.number:
                raise BrokenLineError(f"call {call.number} came in the place of {self.number}")
            request = Request.of(call.body)
            payloads = [self.payload(call.number) for _ in range(request.num_payloads)]
            with forks_end_here():
                failure, result = self.attempt(request, payloads)
            if failure is not None:
                result = Payload.of(failure, "a failure")
            assert result is not None
            self.line.send(call.number, result.content, kind=FAILURE if failure else VALUE)

    def payload(self, number: int) -> Payload:
        frame = self.line.receive()
        if frame is None or frame.number != number:
            raise BrokenLineError(f"call {number} came without all of its arguments")
        return Payload(frame.body)

    def attempt(
        self, request: Request, payloads: list[Payload]
    ) -> tuple[Failure | None, Payload | None]:
        result = None
        with Guard() as guard:
            value = self.run(request, [payload.unpickle() for payload in payloads])
            result = Payload.of(value, f"the result of {request.method}")
        return guard.failure and portable(guard.failure), result

    def run(self, request: Request, values: list[Any]) -> Any:
        if request.method == CONSTRUCT:
            self.worker = values[0]()
            return None
        args = tuple(values[: request.num_args])
        kwargs = dict(zip(request.keywords, values[request.num_args :], strict=True))
        method = getattr(self.worker, request.method)
        return call_method(method, args, kwargs, seconds=threading.TIMEOUT_MAX)


def portable(failure: Failure) -> Failure:
    """Without the exception object when that would not survive the way to the driver."""
    with Guard() as guard:
        Payload.of(failure.cause, "an exception").unpickle()
    return failure if guard.failure is None else replace(failure, cause=None)


def die_with_driver(setup: Setup) -> None:
    if setup.dies_with_thread:
        die_with_parent()
    if os.getppid() != setup.parent_pid:  # it has died before we asked
        os.killpg(0, signal.SIGKILL)
    driver = multiprocessing.parent_process()
    sentinel = os.pidfd_open(setup.driver_pid) if driver is None else driver.sentinel
    threading.Thread(
        target=watch_driver, args=(sentinel,), name="watch driver", daemon=True
    ).start()


def watch_driver(sentinel: int) -> None:
    while not wait([sentinel], timeout=60.0):
        pass
    os.killpg(0, signal.SIGKILL)


def import_main_module(preparation: dict[str, Any]) -> None:
    """Take over the driver's paths and import its script, whose classes may be sent here.

    A group that the script starts during this import, for want of a guard, is an error.
    """
    this_process: Any = multiprocessing.current_process()
    this_process._inheriting = True
    spawn.prepare(preparation)
    del this_process._inheriting

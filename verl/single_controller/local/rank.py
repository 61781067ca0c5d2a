"""The worker process: one rank that answers requests from the pipe, one at a time.

    main thread                            watching thread
      read a request                         waits for the driver's end
      run the method                         driver gone: kill this process group
      send the answer

The process leads a process group of its own, so Ctrl-C reaches only the driver, and ending the
group also ends what the worker started. The kernel is asked to kill the worker together with its
parent, which is the driver or its fork server; the watching thread does the same when the driver
ends, where the kernel cannot be asked.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from dataclasses import replace
from multiprocessing import spawn
from multiprocessing.connection import Connection, wait
from typing import Any

from verl.single_controller.base.failures import Failure, Guard
from verl.single_controller.local.in_process import call_method
from verl.single_controller.local.payload import CONSTRUCT, Payload, Reply, Request, Setup
from verl.utils.environment import replace_variables
from verl.utils.processes import announce

PR_SET_PDEATHSIG = 1


def run_rank(connection: "Connection[Any, Any]") -> None:
    os.setpgid(0, 0)
    setup: Setup = connection.recv()
    die_with_driver(setup)
    replace_variables(setup.variables)
    if setup.preparation is not None:
        import_main_module(setup.preparation)
    connection.send(announce())
    Rank(connection).serve()


class Rank:
    """The worker object and the loop around it."""

    def __init__(self, connection: "Connection[Any, Any]") -> None:
        self.connection = connection
        self.worker: Any = None

    def serve(self) -> None:
        while (request := self.next_request()) is not None:
            contents = [self.connection.recv_bytes() for _ in range(request.num_payloads)]
            failure, payload = self.attempt(request, contents)
            self.connection.send(Reply(request.number, failure))
            if payload is not None:
                self.connection.send_bytes(payload.content)

    def attempt(
        self, request: Request, contents: list[bytes]
    ) -> tuple[Failure | None, Payload | None]:
        payload = None
        with Guard() as guard:
            value = self.run(request, [Payload(content).open() for content in contents])
            payload = Payload.of(value, f"the result of {request.method}")
        return guard.failure and portable(guard.failure), payload

    def next_request(self) -> Request | None:
        try:
            return self.connection.recv()
        except EOFError:  # the driver has closed its end
            return None

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
        Payload.of(failure.cause, "an exception").open()
    return failure if guard.failure is None else replace(failure, cause=None)


def die_with_driver(setup: Setup) -> None:
    if sys.platform == "linux" and setup.dies_with_thread:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
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

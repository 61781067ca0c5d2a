"""The worker process: one rank that answers requests from the pipe, one at a time.

    main thread                            watching thread
      read a request                         waits for the driver's end
      run the method                         driver gone: kill this process group
      send the answer

The process leads a process group of its own, so Ctrl-C reaches only the driver, and ending the
group also ends what the worker started. The kernel is asked to kill the worker together with the
driver; the watching thread does the same where the kernel cannot be asked.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from verl.single_controller.base.failures import Failure, Guard
from verl.single_controller.base.process_probe import announce
from verl.single_controller.local.coroutines import call_method
from verl.single_controller.local.messages import CONSTRUCT, Answer, Request, Setup
from verl.single_controller.local.parcel import Parcel
from verl.utils.environment import set_variable

PR_SET_PDEATHSIG = 1


def main(connection: "Connection[Any, Any]") -> None:
    os.setpgid(0, 0)
    setup: Setup = connection.recv()
    die_with_driver(setup)
    for name, value in setup.variables.items():
        set_variable(name, value)
    connection.send(announce())
    Rank(connection).serve()


class Rank:
    """The worker object and the loop around it."""

    def __init__(self, connection: "Connection[Any, Any]") -> None:
        self.connection = connection
        self.worker: Any = None

    def serve(self) -> None:
        while (request := self.next_request()) is not None:
            contents = [self.connection.recv_bytes() for _ in range(request.num_parcels)]
            failure, parcel = self.attempt(request, contents)
            self.connection.send(Answer(request.number, failure))
            if parcel is not None:
                self.connection.send_bytes(parcel.content)

    def attempt(
        self, request: Request, contents: list[bytes]
    ) -> tuple[Failure | None, Parcel | None]:
        parcel = None
        with Guard() as guard:
            value = self.run(request, [Parcel(content).open() for content in contents])
            parcel = Parcel.of(value, f"the result of {request.method}")
        return guard.failure and portable(guard.failure), parcel

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
        Parcel.of(failure.cause, "an exception").open()
    return failure if guard.failure is None else replace(failure, cause=None)


def die_with_driver(setup: Setup) -> None:
    if sys.platform == "linux" and setup.dies_with_thread:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != setup.driver_pid:  # it has died before we asked
        os.killpg(0, signal.SIGKILL)
    threading.Thread(target=watch_driver, name="watch driver", daemon=True).start()


def watch_driver() -> None:
    driver = multiprocessing.parent_process()
    assert driver is not None
    while driver.is_alive():
        driver.join(timeout=60.0)
    os.killpg(0, signal.SIGKILL)

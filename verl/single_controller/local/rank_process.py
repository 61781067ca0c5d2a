"""One worker process as the driver sees it.

    caller's thread          sender thread                     receiver thread
      submit: queue, return    waits for futures among the       reads answers, completes futures
                               arguments, packs, writes          end of file: the process has died,
                               (a full pipe blocks only here)     fail all that is pending,
                               told so: close the pipe, end  <--  tell the sender, end

Neither thread is ever waited for.
"""

import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing import spawn
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

from verl.single_controller.base.backend import Call
from verl.single_controller.base.failures import SHUT_DOWN, Failure
from verl.single_controller.base.process_probe import ProcessAddress
from verl.single_controller.local import child, fork_server
from verl.single_controller.local.fork_server import ForkedProcess
from verl.single_controller.local.future import LocalFuture
from verl.single_controller.local.messages import Answer, Request, Setup
from verl.single_controller.local.parcel import Parcel
from verl.utils import environment

IDLE_SECONDS = 3600.0
DEATH_POLL_SECONDS = 1.0
EXIT_SECONDS = 2.0
START_HINT = (
    " before it was ready; a script that starts workers must be a file whose top level is guarded "
    'by `if __name__ == "__main__":`, because worker processes import it'
)


class Outgoing(NamedTuple):
    """A request on its way; the futures among its values may not be done yet."""

    future: LocalFuture
    method: str
    args: Sequence[Parcel | LocalFuture]
    kwargs: dict[str, Parcel | LocalFuture]


def start_process(
    theirs: Any, variables: dict[str, str], modules: Sequence[str]
) -> tuple[BaseProcess | ForkedProcess, Setup]:
    """A process that serves `theirs`, and the first message that it expects there."""
    variables = {**environment.all_variables(), **variables}
    driver_pid = os.getpid()
    if fork_server.is_available():
        preparation = spawn.get_preparation_data("rank")
        del preparation["authkey"]  # it refuses to be sent
        forked = fork_server.fork_rank(theirs, modules)
        return forked, Setup(variables, driver_pid, forked.parent_pid, True, preparation)
    spawned = multiprocessing.get_context("spawn").Process(target=child.main, args=(theirs,))
    spawned.start()
    on_main_thread = threading.current_thread() is threading.main_thread()
    return spawned, Setup(variables, driver_pid, driver_pid, on_main_thread, None)


class RankProcess:
    """Started by `__init__`; ended by `stop`."""

    def __init__(self, rank: int, variables: dict[str, str], modules: Sequence[str]) -> None:
        self.rank = rank
        self.address: ProcessAddress | None = None
        self.death: Failure | None = None
        self._is_stopping = False
        self._pending: dict[int, LocalFuture] = {}
        self._count = 0
        self._lock = threading.Lock()
        self._outbox: queue.SimpleQueue[Outgoing | None] = queue.SimpleQueue()
        self._connection, theirs = multiprocessing.Pipe()
        with theirs:
            self.process, setup = start_process(theirs, variables, modules)
        self._connection.send(setup)
        for target in (self._send_all, self._receive_all):
            threading.Thread(target=target, name=f"rank {rank}", daemon=True).start()

    @property
    def pid(self) -> int:
        return self.process.pid or 0

    def submit(self, outgoing: Outgoing) -> None:
        with self._lock:
            gone = SHUT_DOWN if self._is_stopping else self.death
            if gone is None:
                self._outbox.put(outgoing)
        if gone is not None:
            outgoing.future.complete(failure=gone)

    # ---- sender thread ---------------------------------------------------------------------------

    def _send_all(self) -> None:
        while True:
            try:
                outgoing = self._outbox.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                continue
            if outgoing is not None:
                self._send(outgoing)
            elif self.death is None:
                with suppress(OSError):  # the process has ended already
                    self._connection.send(None)
            else:
                self._connection.close()  # here, where nobody can be writing
                return

    def _send(self, outgoing: Outgoing) -> None:
        values = [*outgoing.args, *outgoing.kwargs.values()]
        failure = self._failed_dependency(values, outgoing.future.call)
        if failure is None:
            failure = self._write(outgoing, [packed(value) for value in values])
        if failure is not None:
            outgoing.future.complete(failure=failure)

    def _failed_dependency(self, values: Sequence[Any], call: Call) -> Failure | None:
        """Wait for the futures among `values`; the failure of the first that has none to give."""
        for future in (value for value in values if isinstance(value, LocalFuture)):
            while not future.wait(min(DEATH_POLL_SECONDS, max(0.0, call.remaining_seconds()))):
                if self.death is not None:
                    return self.death
                if call.remaining_seconds() <= 0:
                    return Failure(
                        f"its argument, the result of {future.call.method}, did not come"
                    )
            if future.failure is not None:
                text = f"its argument, the result of {future.call.method}, failed: "
                return replace(future.failure, summary=text + future.failure.summary)
        return None

    def _write(self, outgoing: Outgoing, parcels: list[Parcel]) -> Failure | None:
        with self._lock:
            if self.death is not None:
                return self.death
            self._count += 1
            self._pending[self._count] = outgoing.future
        keywords = tuple(outgoing.kwargs)
        request = Request(self._count, outgoing.method, len(outgoing.args), keywords)
        with suppress(OSError):  # a broken pipe: the receiver tells why and fails what is pending
            self._connection.send(request)
            for parcel in parcels:
                self._connection.send_bytes(parcel.content)
        return None

    # ---- receiver thread -------------------------------------------------------------------------

    def _receive_all(self) -> None:
        with suppress(EOFError, OSError):  # the process, or this side, has closed the pipe
            while self._has_message():
                message: ProcessAddress | Answer = self._connection.recv()
                if isinstance(message, ProcessAddress):
                    self.address = message
                    continue
                content = None if message.failure else Parcel(self._connection.recv_bytes())
                with self._lock:
                    future = self._pending.pop(message.number)
                future.complete(content, message.failure)
        self._bury()

    def _has_message(self) -> bool:
        """False when the process has ended, even if a child of its holds the pipe open."""
        while not wait([self._connection], DEATH_POLL_SECONDS):
            if not self.process.is_alive():
                return False
        return True

    def _bury(self) -> None:
        wait([self.process.sentinel], EXIT_SECONDS)
        self.kill()
        self.process.join(EXIT_SECONDS)
        with self._lock:
            self.death = (
                SHUT_DOWN if self._is_stopping else Failure(self._exit_text(), is_death=True)
            )
            pending, self._pending = list(self._pending.values()), {}
            self._outbox.put(None)
        for future in pending:
            future.complete(failure=self.death)

    def _exit_text(self) -> str:
        code = self.process.exitcode
        if code is None:
            return "the process closed its pipe and cannot be ended"
        if code >= 0:
            hint = "" if self.address else START_HINT
            return f"the process exited with code {code}{hint}"
        hint = "; the kernel does so when memory runs out" if -code == signal.SIGKILL else ""
        return f"the process was killed by {signal.Signals(-code).name}{hint}"

    # ---- the end ---------------------------------------------------------------------------------

    def stop(self) -> None:
        """Ask the process to end; returns at once."""
        with self._lock:
            if not self._is_stopping and self.death is None:
                self._is_stopping = True
                self._outbox.put(None)

    def kill(self) -> None:
        """End the process and everything it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


def packed(value: Parcel | LocalFuture) -> Parcel:
    return value.packed() if isinstance(value, LocalFuture) else value

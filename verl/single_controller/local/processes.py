"""Ranks as child processes, as the driver sees them.

The processes start together, each with its own `RANK` and a common meeting point, and the back-end
is ready when every worker object has been constructed. They meet in a file without a name that the
driver holds open, which no other user can open, and listen on the loopback interface only. An
argument that several ranks get is packed once. Each rank has two threads in the driver, and neither
is ever waited for:

    caller's thread          sender thread                     receiver thread
      submit: queue, return    waits for futures among the       reads replies, completes futures
                               arguments, packs, writes          end of file: the process has died,
                               (a full line blocks only here)     fail all that is pending,
                               told so: close the line, end  <--  tell the sender, end
"""

import json
import multiprocessing
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing import spawn
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any, NamedTuple

from verl.single_controller.base.backend import Backend, Call, Outcome, RankCall, wait_for_results
from verl.single_controller.base.colocation import ClassWithInitArgs
from verl.single_controller.base.failures import SHUT_DOWN, Failure
from verl.single_controller.local import fork_server
from verl.single_controller.local.fork_server import ForkedProcess
from verl.single_controller.local.future import LocalFuture, finished_positions
from verl.single_controller.local.payload import (
    CONSTRUCT,
    FAILURE,
    MAX_BYTES,
    Payload,
    Request,
    Setup,
)
from verl.single_controller.local.rank import run_rank
from verl.utils import environment
from verl.utils import processes as process_probe
from verl.utils.line import BrokenLineError, Frame, Line, call_numbers
from verl.utils.processes import ProcessAddress

STOP_SECONDS = 5.0
"""How long workers may take to end on their own at shutdown before they are killed."""


LOOPBACK_INTERFACE = "lo"
IDLE_SECONDS = 3600.0
DEATH_POLL_SECONDS = 1.0
EXIT_SECONDS = 2.0
START_HINT = (
    " before it was ready; a script that starts workers must be a file whose top level is guarded "
    'by `if __name__ == "__main__":`, because worker processes import it'
)


class ProcessBackend(Backend):
    reference_type = LocalFuture

    def __init__(
        self, construct: Call, spec: ClassWithInitArgs, variables: Sequence[dict[str, str]]
    ) -> None:
        """Start a process per entry of `variables`, its environment, within `construct`'s time."""
        super().__init__()
        payload = Payload.of(spec, f"worker class {spec.worker_class.__qualname__}")
        self._changed = threading.Condition()
        self._ranks: list[RankProcess] = []
        self.workers = self._ranks
        meeting = os.memfd_create("verl-rendezvous")
        # A process that `multiprocessing` started runs these when it ends, before it joins its
        # children, and runs nothing of `atexit` or `weakref.finalize`.
        arguments = (self._ranks, self.is_closed, meeting, os.getpid())
        self._finalizer = Finalize(self, end_processes, arguments, exitpriority=1)
        try:
            for rank, own in enumerate(variables):
                own = {**meeting_variables(meeting), **own}
                self._ranks.append(RankProcess(rank, own, spec.modules))
            rank_calls = [RankCall(rank, (payload,), {}) for rank in range(len(variables))]
            references = self.submit(construct, CONSTRUCT, rank_calls)
            wait_for_results(self, construct, range(len(variables)), references)
        except BaseException:
            self.shutdown()
            raise

    def submit(self, call: Call, method: str, rank_calls: Sequence[RankCall]) -> list[Any]:
        payloads: dict[int, Any] = {}  # by identity: what ranks share is packed once

        def ready(value: Any) -> Any:
            if id(value) not in payloads:
                payloads[id(value)] = _packed_now(value, call)
            return payloads[id(value)]

        requests = [
            Outgoing(
                future=LocalFuture(call, rank, self, self._changed),
                method=method,
                args=[ready(value) for value in args],
                kwargs={key: ready(value) for key, value in kwargs.items()},
            )
            for rank, args, kwargs in rank_calls
        ]
        # Only now: what cannot be packed must not leave some ranks with a call and others without.
        for (rank, _, _), request in zip(rank_calls, requests, strict=True):
            self._ranks[rank].submit(request)
        return [request.future for request in requests]

    def wait(self, references: Sequence[Any], timeout_seconds: float) -> list[int]:
        return finished_positions(references, self._changed, timeout_seconds)

    def outcomes(self, references: Sequence[LocalFuture]) -> list[Outcome]:
        return [reference.outcome for reference in references]

    def stopped_ranks(self, ranks: Sequence[int]) -> list[int]:
        return [rank for rank in ranks if process_probe.is_stopped(self._ranks[rank].pid)]

    def stack_of(self, rank: int) -> str:
        address = self._ranks[rank].address
        if address is None:
            return "it has not started yet"
        return process_probe.stack_of(address)

    def deaths(self) -> dict[int, Failure]:
        return {rank.rank: rank.death for rank in self._ranks if rank.death is not None}

    def label(self, rank: int) -> str:
        return f"rank {rank} (pid {self._ranks[rank].pid})"

    def shutdown(self) -> None:
        self._finalizer()


def _packed_now(value: Any, call: Call) -> Any:
    """Values are packed when the call is made, so later changes do not matter; futures later."""
    if isinstance(value, (Payload, LocalFuture)):
        return value
    return Payload.of(value, f"an argument of {call.method}, a {type(value).__name__},")


def meeting_variables(meeting: int) -> dict[str, str]:
    """Where ranks of one host meet, and the interface for their sockets where none was chosen."""
    interfaces = {
        name: LOOPBACK_INTERFACE
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        if not environment.is_set(name)
    }
    return {"DIST_INIT_METHOD": f"file:///proc/{os.getpid()}/fd/{meeting}", **interfaces}


def end_processes(
    ranks: "list[RankProcess]", is_closed: threading.Event, meeting: int, driver_pid: int
) -> None:
    """Ask all to end, then kill those that have not; also runs at interpreter exit."""
    if os.getpid() != driver_pid:  # a fork of the driver must not end its workers
        return
    is_closed.set()
    for rank in ranks:
        rank.stop()
    give_up = time.monotonic() + STOP_SECONDS
    for rank in ranks:
        rank.process.join(max(0.0, give_up - time.monotonic()))
    for rank in ranks:
        rank.kill()
    for rank in ranks:
        rank.process.join(1.0)
    os.close(meeting)


class Outgoing(NamedTuple):
    """A request on its way; the futures among its values may not be done yet."""

    future: LocalFuture
    method: str
    args: Sequence[Payload | LocalFuture]
    kwargs: dict[str, Payload | LocalFuture]


def start_process(
    theirs: socket.socket, variables: dict[str, str], modules: Sequence[str]
) -> tuple[BaseProcess | ForkedProcess, Setup]:
    """A process that serves `theirs`, and the first message that it expects there."""
    variables = {**environment.all_variables(), **variables}
    driver_pid = os.getpid()
    if fork_server.is_available():
        preparation = spawn.get_preparation_data("rank")
        del preparation["authkey"]  # it refuses to be sent
        forked = fork_server.fork_rank(theirs, modules)
        return forked, Setup(variables, driver_pid, forked.parent_pid, True, preparation)
    spawned = multiprocessing.get_context("spawn").Process(target=run_rank, args=(theirs,))
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
        self._broken: BrokenLineError | None = None
        self._lock = threading.Lock()
        self._outbox: queue.SimpleQueue[Outgoing | None] = queue.SimpleQueue()
        ours, theirs = socket.socketpair()
        with theirs:
            self.process, setup = start_process(theirs, variables, modules)
        self._line = Line(ours, max_bytes=MAX_BYTES)
        self._numbers = call_numbers()
        self._first = next(self._numbers)
        self._line.send(self._first, setup.encoded())
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
                    self._line.send(next(self._numbers), b"")
            else:
                self._line.close()  # here, where nobody can be writing
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

    def _write(self, outgoing: Outgoing, payloads: list[Payload]) -> Failure | None:
        with self._lock:
            if self.death is not None:
                return self.death
            number = next(self._numbers)
            self._pending[number] = outgoing.future
        request = Request(outgoing.method, len(outgoing.args), tuple(outgoing.kwargs))
        with suppress(OSError):  # it has ended: the receiver tells why and fails what is pending
            for content in (request.encoded(), *(payload.content for payload in payloads)):
                self._line.send(number, content)
        return None

    # ---- receiver thread -------------------------------------------------------------------------

    def _receive_all(self) -> None:
        try:
            with suppress(OSError):  # this side has closed the line
                while self._has_message() and (frame := self._line.receive()) is not None:
                    self._take(frame)
        except BrokenLineError as error:
            self._broken = error
            self.kill()
        self._bury()

    def _take(self, frame: Frame) -> None:
        """The reply to a call that is pending; anything else breaks the line."""
        if frame.number == self._first and self.address is None:
            self.address = ProcessAddress(**json.loads(frame.body))
            return
        with self._lock:
            future = self._pending.pop(frame.number, None)
        if future is None:
            raise BrokenLineError(f"a reply came to call {frame.number}, for which nobody waits")
        payload = Payload(frame.body)
        if frame.kind == FAILURE:
            future.complete(failure=payload.unpickle())
        else:
            future.complete(payload)

    def _has_message(self) -> bool:
        """False when the process has ended, even if a child of its holds the pipe open."""
        while not self._line.has_bytes(DEATH_POLL_SECONDS):
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
        if self._broken is not None:
            return f"the process was killed, for it broke the line to it: {self._broken}"
        code = self.process.exitcode
        if code is None:
            return "the process closed its line and cannot be ended"
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


def packed(value: Payload | LocalFuture) -> Payload:
    return value.packed() if isinstance(value, LocalFuture) else value

"""Environments in worker processes, one for each trajectory that needs one.

    event loop                      thread of a call              worker process (`host`)
      lease.reset, lease.step ----->  send, wait, receive ------>   the world answers
      lease.release --------------->  close or kill ------------->  free for the next lease

A lease holds one slot of `num_workers` from its first call to its release and, while it does, a
process of its own: a world that hangs, dies or writes to its global generators concerns nobody
else. A call that passes its deadline ends with the process killed, and all that it started
(`verl.utils.forked_workers`); like every other failure of a world it is an `InfraFault`, for the
policy cannot have caused it. An action that the world refuses, or a limit that it has for the
policy's own doing, is an observation like any other.

Processes are forks of a fresh interpreter that has imported the environment's package: they start
in milliseconds and share nothing with the trainer. They stay for the next lease and end with it.
"""

import asyncio
import functools
import json
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl.environments.base import Action, BadEnvironment, Observation
from verl.environments.host import MAX_CALL_BYTES, MAX_REPLY_BYTES, from_message
from verl.protocol.trajectory import InfraFault
from verl.utils.environment import all_variables, scrubbed_environment
from verl.utils.forked_workers import (
    LostWorkerError,
    WorkerProcess,
    WorkerProcesses,
    await_reply,
    interpreter_server,
)
from verl.utils.line import BrokenLineError, call_numbers

CLOSE_SECONDS = 5.0
"""For a world to end in good order; then its process is killed."""

START_SECONDS = 120.0
"""For a fresh interpreter to import what it forks."""

MAX_RETRIES = 2
"""Of a reset whose process was lost: nothing has happened in that episode."""

PRELOADED = {
    "gymnasium": ("verl.environments.adapters", "gymnasium"),
    "textarena": ("verl.environments.adapters", "textarena"),
    "reasoning_gym": ("verl.environments.adapters", "reasoning_gym"),
    "verifiers": ("verl.environments.verifiers", "verifiers", "datasets"),
}


@dataclass(frozen=True, kw_only=True)
class EnvironmentSpec:
    """Which environment, with which arguments; `python` is another interpreter to run it in."""

    name: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    python: str | None = None

    @classmethod
    def of(cls, stated: Any) -> "EnvironmentSpec":
        """From the `env` of a row or of the configuration: a name, or a mapping."""
        if isinstance(stated, str):
            return cls(name=stated)
        if not isinstance(stated, Mapping) or not stated.get("name"):
            raise ValueError(
                f"env is {stated!r:.200}; it needs a name, such as "
                '{"name": "textarena:GuessTheNumber-v0", "kwargs": {}}'
            )
        unknown = sorted(stated.keys() - {"name", "kwargs", "python"})
        if unknown:
            raise ValueError(f"env has {unknown}; known are name, kwargs and python")
        kwargs = stated.get("kwargs") or {}
        try:  # tables keep ragged arguments as JSON
            kwargs = json.loads(kwargs) if isinstance(kwargs, str) else kwargs
        except ValueError as error:
            raise ValueError(
                f"env {stated['name']!r}: kwargs are {kwargs!r:.200}, which is no JSON: {error}"
            ) from error
        if not isinstance(kwargs, Mapping):
            raise ValueError(f"env {stated['name']!r}: kwargs are {kwargs!r:.200}, no mapping")
        given = {name: value for name, value in kwargs.items() if value is not None}
        return cls(name=stated["name"], kwargs=given, python=stated.get("python"))


@dataclass
class PoolCounts:
    """What has happened in a pool since it was made."""

    num_leases: int = 0
    num_lost: int = 0
    """Processes that died, hung or broke the protocol."""

    waited_seconds: float = 0.0
    """Time that leases waited for a free slot, all together."""

    longest_wait_seconds: float = 0.0
    most_in_use: int = 0


class EnvironmentPool:
    """At most `num_workers` environments at a time; `timeout_seconds` for each of their calls.

    All leases belong to one event loop.
    """

    def __init__(self, *, num_workers: int = 64, timeout_seconds: float = 60.0) -> None:
        if num_workers < 1:
            raise ValueError(f"num_workers is {num_workers}; a pool needs at least 1")
        self.num_workers = num_workers
        self.timeout_seconds = timeout_seconds
        self.counts = PoolCounts()
        self.num_in_use = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._numbers = call_numbers()
        self._lock = threading.Lock()
        self._processes: dict[tuple[str, ...], WorkerProcesses] = {}
        self._close = weakref.finalize(self, end_all, self._processes)

    def lease(self, owner: str) -> "EnvironmentLease":
        """`owner` names the trajectory in messages. Nothing is held until the first call."""
        return EnvironmentLease(self, owner)

    def close(self) -> None:
        """End all processes; this also happens when nobody needs the pool any more."""
        self._close()

    async def take_slot(self) -> float:
        """Wait for a free slot; how long that took."""
        start = time.perf_counter()
        if self.num_in_use < self.num_workers:
            self.num_in_use += 1
        else:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():  # the slot had just been handed over
                    self.free_slot()
                raise
        waited = time.perf_counter() - start
        self.counts.num_leases += 1
        self.counts.waited_seconds += waited
        self.counts.longest_wait_seconds = max(waited, self.counts.longest_wait_seconds)
        self.counts.most_in_use = max(self.num_in_use, self.counts.most_in_use)
        return waited

    def free_slot(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # else it was cancelled
                turn.set_result(None)
                return
        self.num_in_use -= 1

    def processes_of(self, spec: EnvironmentSpec) -> WorkerProcesses:
        """Those of its interpreter and package, which are started when they are first needed."""
        modules = PRELOADED.get(spec.name.partition(":")[0], ("verl.environments.host",))
        key = (spec.python or sys.executable, *modules)
        with self._lock:
            if not self._close.alive:
                raise RuntimeError("the pool of environments is closed")
            if key not in self._processes:
                self._processes[key] = start_processes(spec.python, modules)
            return self._processes[key]


def start_processes(python: str | None, modules: Sequence[str]) -> WorkerProcesses:
    variables = all_variables() if python is None else scrubbed_environment()
    if python is not None:
        python = str(Path(python).expanduser())
        if not Path(python).is_file():
            raise BadEnvironment(f"env.python is {python!r}, which does not exist")
    server = interpreter_server(
        "verl.environments.host:work",
        python=python or sys.executable,
        path=sys.path if python is None else (),
        # The order of a set of strings follows from this variable: episodes must repeat.
        variables={**variables, "PYTHONHASHSEED": "0"},
        modules=modules,
    )
    return WorkerProcesses(server, max_reply_bytes=MAX_REPLY_BYTES, control_seconds=START_SECONDS)


def end_all(processes: Mapping[tuple[str, ...], WorkerProcesses]) -> None:
    for each in processes.values():
        each.end()


class EnvironmentLease:
    """One environment for one trajectory. `release` it in every exit."""

    def __init__(self, pool: EnvironmentPool, owner: str) -> None:
        self.owner = owner
        self.waited_seconds = 0.0
        self._pool = pool
        self._spec: EnvironmentSpec | None = None
        self._processes: WorkerProcesses | None = None
        self._worker: WorkerProcess | None = None
        self._call: Future[dict[str, Any]] | None = None
        self._is_abandoned = False
        self._release: Future[None] | None = None
        self._has_slot = False

    async def reset(
        self, spec: EnvironmentSpec, row: Mapping[str, Any], seed: int
    ) -> tuple[Observation, list[dict[str, Any]]]:
        """Make the environment and begin the episode: what it shows first, and its tools."""
        self._spec = spec
        call = {"call": "reset", "name": spec.name, "kwargs": dict(spec.kwargs)}
        reply = await self._say({**call, "row": dict(row), "seed": seed})
        return self._observation(reply), reply["tools"]

    async def step(self, action: Action) -> Observation:
        calls = [vars(one) for one in action.tool_calls]
        reply = await self._say({"call": "step", "text": str(action), "tool_calls": calls})
        return self._observation(reply)

    async def release(self) -> None:
        """End the episode and give the process back; a call that is under way is killed."""
        if self._release is None:
            self._is_abandoned = self._call is not None and not self._call.done()
            self._release = in_thread(self._end)
            if self._has_slot:
                loop = asyncio.get_running_loop()
                self._release.add_done_callback(functools.partial(free_slot, loop, self._pool))
        await asyncio.shield(asyncio.wrap_future(self._release))

    async def _say(self, call: Mapping[str, Any]) -> dict[str, Any]:
        assert self._release is None, "the lease was released"
        if not self._has_slot:
            self.waited_seconds = await self._pool.take_slot()
            self._has_slot = True
        body = json.dumps(call).encode()
        if len(body) > MAX_CALL_BYTES:
            raise ValueError(
                f"the row of {self.owner} has {len(body)} bytes as JSON; an environment gets at "
                f"most {MAX_CALL_BYTES}"
            )
        self._call = in_thread(lambda: self._converse(call["call"], body))
        reply = await asyncio.wrap_future(self._call)
        if reply.get("kind") == "bad":
            raise BadEnvironment(reply["error"])
        if "error" in reply:
            raise self._fault(f"{call['call']} raised {reply['error']}\n{reply['trace']}")
        return reply

    def _observation(self, reply: Mapping[str, Any]) -> Observation:
        try:
            return from_message(reply["observation"])
        except (LookupError, TypeError, ValueError) as error:
            raise self._fault(f"its reply is no observation: {error}") from error

    def _fault(self, text: str) -> InfraFault:
        name = self._spec.name if self._spec else "?"
        return InfraFault(f"the environment {name} of {self.owner} failed: {text}", reason=name)

    # ---- in a thread -----------------------------------------------------------------------------

    def _converse(self, what: str, body: bytes) -> dict[str, Any]:
        """Send the call and wait for the reply; the process is killed unless there is one."""
        losses: list[str] = []
        while True:
            try:
                return self._converse_once(what, body)
            except LostWorkerError as loss:
                losses.append(str(loss))
                self._pool.counts.num_lost += 1
                if what != "reset" or self._is_abandoned or len(losses) > MAX_RETRIES:
                    raise self._fault(losses[-1]) from loss

    def _converse_once(self, what: str, body: bytes) -> dict[str, Any]:
        if self._worker is None and what != "reset":
            raise self._fault("its process is gone")
        worker = self._worker or self._take()
        seconds = CLOSE_SECONDS if what == "close" else self._pool.timeout_seconds
        deadline = time.monotonic() + seconds
        number = next(self._pool._numbers)
        is_answered = False
        try:
            worker.line.begin_call(number, body, deadline=deadline)
            await_reply(worker, deadline)
            reply = json.loads(worker.line.end_call(number, deadline=deadline))
            if not isinstance(reply, dict):
                raise BrokenLineError(f"a reply that is no object: {reply!r:.100}")
            is_answered = True
            return reply
        except TimeoutError as error:
            text = f"{what} took longer than {seconds:g} s; its process was killed"
            self._pool.counts.num_lost += 1
            raise self._fault(text) from error
        except (OSError, EOFError) as error:
            raise LostWorkerError(f"process {worker.pid} ended during {what} ({error})") from error
        except (BrokenLineError, ValueError) as error:
            text = f"process {worker.pid} was killed during {what}: {error}"
            raise LostWorkerError(text) from error
        finally:
            if not is_answered:
                self._kill()

    def _take(self) -> WorkerProcess:
        """A process for this lease: an idle one that is still there, or a new one."""
        assert self._spec is not None
        try:
            self._processes = self._pool.processes_of(self._spec)
            worker = self._processes.take()
            while worker.line.has_bytes():  # the end, or something that nobody asked for
                self._processes.kill(worker)
                worker = self._processes.take()
        except OSError as error:
            raise self._fault(f"no process can be started for it: {error}") from error
        self._worker = worker
        if self._is_abandoned:  # after the assignment: `release` looks at it after its own
            raise self._fault("the trajectory was cancelled")
        return worker

    def _kill(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None and self._processes is not None:
            self._processes.kill(worker)

    def _end(self) -> None:
        if self._is_abandoned and self._call is not None:
            worker, processes = self._worker, self._processes
            if worker is not None and processes is not None:
                processes.stop(worker)
            with suppress(InfraFault):  # nobody asks any more
                self._call.result(timeout=START_SECONDS + self._pool.timeout_seconds)
            self._kill()
        elif self._worker is not None and self._processes is not None:
            with suppress(InfraFault):  # it was killed, and counted
                if self._converse("close", b'{"call": "close"}').get("is_clean"):
                    worker, self._worker = self._worker, None
                    self._processes.put_back(worker)
            self._kill()  # unless it was put back


def in_thread(function: Callable[[], Any]) -> "Future[Any]":
    """Run it in a thread that does not keep the program from ending."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()  # a waiter that is cancelled does not cancel it

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="environment", daemon=True).start()
    return future


def free_slot(loop: asyncio.AbstractEventLoop, pool: EnvironmentPool, _: "Future[None]") -> None:
    with suppress(RuntimeError):  # the loop is closed: nobody waits
        loop.call_soon_threadsafe(pool.free_slot)

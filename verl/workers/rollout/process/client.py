"""`EngineProcess`: an engine in a process of its own, used as if it were here.

    generate, stream ---> link ---> host: HostedEngine          (tokens, both ways)
    update_weights  --- buckets --> host: streaming receiver    (memory that both see)
    accept_weights, then somebody else's TcpSender ---> host    (straight into that process)

The process generates only with weights that arrived whole: it has no version from the moment an
update is announced until every tensor has come and the fingerprints are equal. If it dies, hangs or
goes silent, all who wait get `EngineLostError`; `restart` starts another one, which holds nothing.
Sleep is refused while requests run, and so are new weights, unless they are sent `in_flight`: then
the engine pauses, and requests go on with the new weights (`policy_versions` tell for each token).
"""

import asyncio
import itertools
import multiprocessing
import threading
from collections.abc import AsyncIterator, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from verl.utils.device import free_cached_memory
from verl.workers.rollout.base import (
    EngineLostError,
    GenerationRequest,
    OnEnd,
    StreamingRollout,
    TokenDelta,
    TokenOutput,
)
from verl.workers.rollout.process.child import Child
from verl.workers.rollout.process.hosted import EngineFacts
from verl.workers.rollout.process.link import Link, Timeouts
from verl.workers.rollout.process.weights import CUDA_IPC, SHARED_MEMORY, TCP
from verl.workers.rollout.process.wire import WireError
from verl.workers.rollout.stepping import DeltaFeed, Submission
from verl.workers.weight_sync import Published, WeightSender, WeightSyncError, send_weights
from verl.workers.weight_sync.bucket import ChannelError, NoRoomError, WeightsNotReadyError
from verl.workers.weight_sync.cuda_ipc import CudaIpcSender
from verl.workers.weight_sync.shared_memory import SharedMemorySender

MAX_HEARTBEAT_SECONDS = 1.0
CLOSE_SECONDS = 10.0


class EngineStartError(RuntimeError):
    """The engine's process did not come up; the message has the last that it wrote."""


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """Which engine to start, where, and how patient to be with it."""

    build: str
    """`package.module:function`; called in the engine's process with `options`, gives a
    `HostedEngine`."""

    options: Mapping[str, Any]
    """Plain JSON values."""

    python: str | None = None
    """The interpreter of the engine's environment; None is this one."""

    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables added to a copy of ours without secrets and what belongs to this process alone."""

    has_weights: bool = False
    """The engine loads its weights itself: version 0 is ready at the start. Otherwise nothing is
    served before the first update."""

    bucket_bytes: int = 64 << 20
    start_seconds: float = 300.0
    answer_seconds: float = 60.0
    """A process silent for so long counts as lost. It gives signs of life while it works."""

    work_seconds: float = 900.0
    """So does one that is at one step, one call or one tensor for so long."""

    sync_seconds: float = 600.0
    """Longest wait for the next part of an update of the weights."""

    def __post_init__(self) -> None:
        if self.sync_seconds >= self.work_seconds:
            raise ValueError(
                f"sync_seconds ({self.sync_seconds:g}) must be less than work_seconds "
                f"({self.work_seconds:g}): a process that waits for weights is not stuck"
            )


class EngineProcess(StreamingRollout):
    """Start it, give it weights (unless it has them), then ask for tokens from any thread."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self._sender = WeightSender(spec.bucket_bytes)
        self._link: Link | None = None
        self._facts: EngineFacts | None = None
        self._num_restarts = 0
        self._is_asleep = False
        self.load_seconds = 0.0
        """What the engine itself took for the last update, apart from waiting for tensors."""

        self.stall_seconds = 0.0
        """For how long no token could be generated during the last update."""

        self._is_closed = False
        self._starting = threading.Lock()
        self._updating = threading.Lock()

    # ---- its life --------------------------------------------------------------------------------

    def start(self) -> EngineFacts:
        """Start the process and wait until its engine is built.

        `EngineStartError` if that fails, ValueError if the engine refuses its options.
        """
        with self._starting:
            if self._link is not None:
                raise RuntimeError("this engine has been started; call restart() for a new process")
            return self._start()

    @property
    def facts(self) -> EngineFacts:
        """What the engine says of itself."""
        if self._facts is None:
            raise EngineLostError("the engine's process has not been started; call start() first")
        return self._facts

    @property
    def num_restarts(self) -> int:
        return self._num_restarts

    @property
    def cache_usage(self) -> float | None:
        return None if self._link is None else self._link.cache_usage

    @property
    def pid(self) -> int:
        """Process id of the running process."""
        return self._require_link().pid

    def is_alive(self) -> bool:
        return self._link is not None and self._link.is_alive

    def restart(self) -> None:
        """End the process, if it has not, and start another one, which holds no weights (or those
        that it loads itself)."""
        with self._starting:
            self._end(grace_seconds=0.0)
            self._num_restarts += 1
            self._start()

    def close(self) -> None:
        """End the process; those who still wait are told that it is lost. No other is started."""
        with self._starting:
            self._is_closed = True
            self._end(grace_seconds=CLOSE_SECONDS)

    # ---- tokens ----------------------------------------------------------------------------------

    @property
    def policy_version(self) -> int:
        link = self._require_link()
        link.require_alive()
        version = link.version
        if version is None:
            raise WeightsNotReadyError(
                "the engine's process holds no complete version of the weights and serves nothing; "
                "send them with update_weights()"
            )
        return version

    def submit(
        self, request: GenerationRequest, on_end: OnEnd | None = None
    ) -> Future[list[TokenOutput]]:
        submission = Submission(request, on_end)
        try:
            link = self._require_link()
            pending = link.submit(request, on_end=submission.end)
        except EngineLostError as error:
            submission.fail(error)
            return submission.future

        def resolve(answer: Future[list[TokenOutput]]) -> None:
            error = answer.exception()
            if error is None:
                submission.resolve()
            else:
                submission.fail(error)

        def give_up_if_cancelled(future: Future[list[TokenOutput]]) -> None:
            if future.cancelled():
                link.give_up(pending)

        submission.future.add_done_callback(give_up_if_cancelled)
        pending.future.add_done_callback(resolve)
        return submission.future

    async def stream(self, request: GenerationRequest) -> AsyncIterator[TokenDelta]:
        link, feed = self._require_link(), DeltaFeed(asyncio.get_running_loop())
        pending = link.submit(request, feed.put)
        try:
            while (delta := await feed.next()) is not None:
                yield delta
            link.wait(pending)  # it has ended; an error is raised here
        finally:
            link.give_up(pending)

    def abort(self, request_id: str) -> None:
        if self._link is not None:
            self._link.abort(request_id)

    def close_session(self, session_id: str) -> None:
        if self._link is not None:
            self._link.close_session(session_id)

    # ---- memory and weights ----------------------------------------------------------------------

    def sleep(self, level: int = 1) -> None:
        """Give memory back: 1 what generation needs beside the weights, 2 the weights too, which
        must then be sent again. An engine that cannot (`facts.can_sleep`) forgets its cache."""
        link = self._require_link()
        link.call("sleep", level=level)
        self._is_asleep = self.facts.can_sleep
        if level > 1 and self.facts.can_sleep:
            link.version = None

    def wake_up(self) -> None:
        """Take the memory again; an engine that does not sleep has it."""
        link = self._require_link()
        link.require_alive()
        if self._is_asleep:
            free_cached_memory()  # it may share the device, and cannot take what torch keeps here
            link.call("wake_up")
            self._is_asleep = False

    def update_weights(
        self, weights: Iterable[tuple[str, Tensor]], version: int, *, in_flight: bool = False
    ) -> Published:
        """Send all weights, whole, under their Hugging Face names.

        Returns when the engine has all of them and the fingerprints are equal. If anything goes
        wrong the engine serves nothing until an update succeeds; if requests run, nothing is sent.
        With `in_flight` they are paused meanwhile, and after a failure stay so until an update
        succeeds or they are aborted.
        """
        rest = iter(weights)
        first = list(itertools.islice(rest, 1))
        is_cuda = any(tensor.is_cuda for _, tensor in first)
        way, kind = (CUDA_IPC, CudaIpcSender) if is_cuda else (SHARED_MEMORY, SharedMemorySender)
        ends: Any = multiprocessing.Pipe()
        ours, theirs = ends
        with self._updating, ours, theirs:
            link = self._require_link()
            self._accept(link, way=way, descriptor=theirs.fileno(), in_flight=in_flight)
            theirs.close()  # so that the end of the process ends the pipe
            received = link.begin("receive_weights")
            channel = kind([ours], timeout_seconds=self.spec.sync_seconds)
            link.version = None
            try:
                sent = send_weights(self._sender, itertools.chain(first, rest), version, channel)
            except NoRoomError:
                ours.close()
                with suppress(ChannelError):  # all that it knows is that the pipe was closed
                    link.wait(received)
                raise
            except WeightSyncError:
                ours.close()
                link.wait(received)  # raises what went wrong on the side that knows
                raise
            held = self._note_update(link, link.wait(received))
            assert held == sent  # or it would not have been confirmed
        return held

    def accept_weights(self, token: str, host: str, *, in_flight: bool = False) -> tuple[str, int]:
        """Let the process open a port for one update, where a sender that knows the token finds it.

        From now on nothing is generated until the update has come; with `in_flight`, from when
        `receive_weights` is called.
        """
        link = self._require_link()
        address = self._accept(link, way=TCP, token=token, host=host, in_flight=in_flight)
        return address[0], address[1]

    def receive_weights(self) -> Published:
        """Wait until the process has taken that update in; what it holds then."""
        link = self._require_link()
        try:
            answer = link.call("receive_weights")
        except (WeightSyncError, ValueError):
            link.version = None
            raise
        return self._note_update(link, answer)

    # ---- the process -----------------------------------------------------------------------------

    def _require_link(self) -> Link:
        if self._link is None:
            raise EngineLostError("the engine's process is not running; call start() or restart()")
        return self._link

    def _note_update(self, link: Link, answer: Mapping[str, Any]) -> Published:
        held = Published(*answer["held"])
        link.version, self.load_seconds = held.version, float(answer["load_seconds"])
        self.stall_seconds = float(answer["stall_seconds"])
        return held

    def _accept(self, link: Link, **arguments: Any) -> Any:
        answer = link.call(
            "accept_weights",
            **arguments,
            bucket_bytes=self.spec.bucket_bytes,
            timeout_seconds=self.spec.sync_seconds,
        )
        if not arguments["in_flight"]:
            link.version = None
        return answer

    def _start(self) -> EngineFacts:
        if self._is_closed:  # a recovery may be under way when a run ends
            raise EngineStartError("this engine was closed; make another EngineProcess")
        spec = self.spec
        interval = min(MAX_HEARTBEAT_SECONDS, spec.answer_seconds / 5)
        try:
            child = Child(spec.python, spec.environment, heartbeat_seconds=interval)
        except OSError as error:
            raise EngineStartError(
                f"cannot start {spec.python!r} ({error}); rollout.python must be the path of a "
                "Python interpreter"
            ) from error
        try:
            child.handshake(spec.start_seconds)
        except BaseException as error:
            child.end()
            if isinstance(error, WireError):
                raise EngineStartError(f"{error}; {child.stderr_tail()}") from error
            raise
        silent = spec.answer_seconds
        link = Link(child, Timeouts(silent_seconds=silent, work_seconds=spec.start_seconds))
        try:
            facts = link.call(
                "build",
                build=spec.build,
                options=dict(spec.options),
                has_weights=spec.has_weights,
            )
        except BaseException as error:
            link.close(grace_seconds=0.0)
            if isinstance(error, EngineLostError):
                raise EngineStartError(f"the engine was not built: {error}") from error
            raise
        link.timeouts = Timeouts(silent_seconds=silent, work_seconds=spec.work_seconds)
        self._link, self._facts, self._is_asleep = link, EngineFacts(**facts), False
        link.media_form = self._facts.media
        link.version = 0 if spec.has_weights else None
        return self._facts

    def _end(self, grace_seconds: float) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close(grace_seconds)

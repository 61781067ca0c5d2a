"""The engine's process: reads calls, steps the engine, sends what came.

    link --calls--> | submit, abort, weights, sleep |      heartbeat thread: liveness, and the
                    | one step of the engine        |      end of this process when its parent ends
    link <--deltas- | (again and again)             |

One thread does everything that concerns the engine, so no token is ever computed while weights
change, and calls are read between any two steps. An update "in flight" finds requests that run: the
engine pauses between two steps, takes the weights in, and goes on; every token is stamped with the
version that computed it. Until an update is whole nothing is stepped. A mistake of the caller is
answered; any other error ends the process, because the engine's state is unknown after it: the
parent sees the end at once, with the traceback.

The heartbeat says for how long the main thread has been at its present work, so a long step is not
taken for silence and a deadlock shows. The same thread watches for the end of the parent and then
kills this process group: the link alone does not tell, since a fork of the parent may hold its end
open. Started by `link`, in whatever environment the engine needs: this imports torch and no more.
"""

import gc
import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib import import_module
from typing import Any

from verl.utils.import_utils import uncollected
from verl.workers.rollout.base import TokenDelta
from verl.workers.rollout.process.hosted import HostedEngine
from verl.workers.rollout.process.messages import (
    ANSWERED_ERRORS,
    EngineStateError,
    delta_messages,
    error_fields,
    request_of,
)
from verl.workers.rollout.process.weights import IncomingWeights
from verl.workers.rollout.process.wire import Message, Wire, WireClosedError, encode
from verl.workers.weight_sync.bucket import WeightsNotReadyError


class Heartbeat:
    """Thread that reports liveness; the main thread calls `progressed` after each call and step."""

    def __init__(self, wire: Wire, *, parent: int, heartbeat_seconds: float, folder: str) -> None:
        self._wire = wire
        self._folder = folder  # the parent removes it, if it can
        self._parent = parent
        self._heartbeat_seconds = heartbeat_seconds
        self._last_progress = time.monotonic()

    def start(self) -> None:
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def progressed(self) -> None:
        self._last_progress = time.monotonic()

    def _run(self) -> None:
        while os.getppid() == self._parent and not self._wire.has_hung_up(self._heartbeat_seconds):
            try:
                self._wire.send_if_free(
                    encode({"heartbeat": time.monotonic() - self._last_progress})
                )
            except WireClosedError:
                break
        self.end_all()

    def end_all(self) -> None:
        """Kill this process group; called by the first thread that sees the end of the parent."""
        shutil.rmtree(self._folder, ignore_errors=True)
        os.killpg(os.getpgrp(), signal.SIGKILL)


HANDSHAKE_SECONDS = 30.0
IDLE_SECONDS = 1.0


def main() -> None:
    gc.enable()  # what imported this has disabled it
    setup = json.loads(sys.stdin.readline())
    line = socket.socket(fileno=setup["descriptor"])
    line.set_inheritable(False)  # what the engine starts must not hold it open
    wire = Wire(line)
    wire.handshake(setup["token"], starts=True, timeout_seconds=HANDSHAKE_SECONDS)
    heartbeat = Heartbeat(
        wire,
        parent=setup["parent"],
        heartbeat_seconds=setup["heartbeat_seconds"],
        folder=setup["folder"],
    )
    heartbeat.start()
    try:
        Host(wire, heartbeat).serve()
    except WireClosedError:
        heartbeat.end_all()


class Host:
    """The engine and the loop that serves its calls and steps it."""

    def __init__(self, wire: Wire, heartbeat: Heartbeat) -> None:
        self._wire = wire
        self._heartbeat = heartbeat
        self._engine: HostedEngine | None = None
        self._under_way: dict[int, int] = {}  # request -> samples that have not ended
        self._aborted: set[int] = set()
        self._version: int | None = None
        self._incoming = IncomingWeights(heartbeat.progressed)
        self._is_in_flight = False  # the update that was announced may find requests running
        self._is_paused = False
        self._is_asleep = False
        self._is_over = False
        self._calls: dict[str, Callable[[Message], Any]] = {
            "build": self._build,
            "submit": self._submit,
            "abort": self._abort,
            "close_session": self._close_session,
            "accept_weights": self._accept_weights,
            "receive_weights": self._receive_weights,
            "sleep": self._sleep,
            "wake_up": self._wake_up,
            "close": self._close,
        }

    @property
    def engine(self) -> HostedEngine:
        assert self._engine is not None  # the first call is `build`
        return self._engine

    def serve(self) -> None:
        """Answer calls and step the engine until `close` is called."""
        while not self._is_over:
            for call in self._wire.arrived(0.0 if self._can_step else IDLE_SECONDS):
                self._answer(call)
                self._heartbeat.progressed()
            if self._can_step:
                self._step()
            self._heartbeat.progressed()

    @property
    def _can_step(self) -> bool:
        """Without weights requests stay as they are; aborted ones only have to tell their end."""
        has_weights = self._version is not None or self._under_way.keys() <= self._aborted
        return bool(self._under_way) and has_weights

    def _answer(self, call: Message) -> None:
        try:
            value = self._calls[call["call"]](call)
        except ANSWERED_ERRORS as error:
            self._wire.send(encode({"answer": call["number"], **error_fields(error)}))
            return
        if call["call"] != "submit":
            self._wire.send(encode({"answer": call["number"], "value": value}))

    # ---- requests --------------------------------------------------------------------------------

    def _build(self, call: Message) -> dict[str, Any]:
        self._engine = load_builder(call["build"])(call["options"])
        self._version = 0 if call["has_weights"] else None
        return asdict(self.engine.facts())

    def _submit(self, call: Message) -> None:
        request = request_of(call["request"])
        if self._version is None:
            raise WeightsNotReadyError(
                f"request {request.request_id} came to an engine that holds no complete version of "
                "the weights; nothing is served until an update has arrived whole"
            )
        if self._is_asleep:
            raise EngineStateError(
                f"request {request.request_id} came to an engine that sleeps; call wake_up() first"
            )
        self.engine.submit(call["number"], request)
        self._under_way[call["number"]] = request.num_samples

    def _abort(self, call: Message) -> None:
        if call["request"] in self._under_way:  # else it has ended meanwhile
            self._aborted.add(call["request"])
            self.engine.abort(call["request"])

    def _step(self) -> None:
        if not self.engine.has_work():
            raise RuntimeError(
                f"the engine says that it has nothing to do, but {len(self._under_way)} requests "
                "have not ended"
            )
        self._tell(self.engine.step())

    def _tell(self, deltas: Sequence[tuple[int, TokenDelta]]) -> None:
        """Send tokens, which were computed with the current weights."""
        for number, delta in deltas:
            assert self._version is not None or not delta.token_ids
            if delta.stop_reason:
                self._under_way[number] -= 1
                if not self._under_way[number]:
                    del self._under_way[number]
                    self._aborted.discard(number)
        for message in delta_messages(deltas, -1 if self._version is None else self._version):
            self._wire.send(encode({**message, "cache_usage": self.engine.cache_usage()}))

    def _require_idle(self, deed: str) -> None:
        """Aborted requests still have to say that they ended; others are in the way."""
        while self._under_way and self._under_way.keys() <= self._aborted:
            self._step()
        if self._under_way:
            raise EngineStateError(
                f"{deed} came while {len(self._under_way)} requests run; await or abort them "
                "first, so that no request mixes two versions of the weights"
            )

    def _close_session(self, call: Message) -> None:
        self.engine.close_session(call["session_id"])

    # ---- weights and memory ----------------------------------------------------------------------

    def _accept_weights(self, call: Message) -> list[Any] | None:
        self._is_in_flight = False
        if not call["in_flight"]:
            self._require_idle("new weights")
        elif not self.engine.facts().can_pause:
            raise EngineStateError(
                f"{self.engine.facts().name} cannot take new weights while requests run; await or "
                "abort them first, or use rollout.name=native, native_process or vllm"
            )
        address = self._incoming.accept(call)
        self._is_in_flight = call["in_flight"]
        if not self._is_in_flight:
            self._version = None
        return address

    def _receive_weights(self, call: Message) -> dict[str, Any]:
        is_in_flight, self._is_in_flight = self._is_in_flight, False
        if self._version is not None and not is_in_flight:
            raise EngineStateError("receive_weights came without accept_weights before it")
        start = time.perf_counter()
        if is_in_flight:
            self._tell(self.engine.pause())
            self._is_paused = True
        self._version = None
        published, seconds = self._incoming.receive(self.engine.load_weights)
        if self._is_paused:  # by this update, or by one that broke off
            self.engine.resume()
            self._is_paused = False
        elif not self.engine.facts().keeps_cache:
            self.engine.forget_cache()
        self._version = published.version
        stall = time.perf_counter() - start
        return {"held": list(published), "load_seconds": seconds, "stall_seconds": stall}

    def _sleep(self, call: Message) -> None:
        self._require_idle("sleep")
        if not self.engine.facts().can_sleep:
            self.engine.forget_cache()
            return
        self.engine.sleep(call["level"])
        self._is_asleep = True
        if call["level"] > 1:
            self._version = None

    def _wake_up(self, call: Message) -> None:
        if self._is_asleep:
            self.engine.wake_up()
            self._is_asleep = False

    def _close(self, call: Message) -> None:
        self._is_over = True
        if self._engine is not None:
            self._engine.close()


def load_builder(name: str) -> Callable[[dict[str, Any]], HostedEngine]:
    """The function behind "package.module:function"."""
    module, _, function = name.partition(":")
    with uncollected():
        loaded = import_module(module)
    return vars(loaded)[function]

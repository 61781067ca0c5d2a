"""Generations in flight: one connection and one thread each, read from one place.

    start --> waiting --> [ thread: /generate, message by message ] --+
                          [ thread: ...                           ] --+--> queue --> take --> deltas
    abort --> out of the waiting line, or /abort_request

Threads only read and pass on; everything else happens in the engine's one thread. A request counts
as lost when the whole server has been silent for too long: one of many may well have to wait.
SGLang has no tokenizer here, so stop texts are matched on this side; and with `ignore_eos` it
checks no stop token at all, though only the model's own are to be ignored.
"""

import http.client
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from verl.workers.rollout.base import GenerationRequest, SamplingParams, TokenDelta
from verl.workers.rollout.native.sequence import tokens_until_stop
from verl.workers.rollout.sglang_rollout.arguments import sample_name
from verl.workers.rollout.sglang_rollout.server import Server, ServerRefusedError


@dataclass
class RunningSample:
    """A sample of a request; `take` follows it from message to message."""

    index: int
    params: SamplingParams
    decode_text: Callable[[list[int]], str]
    is_over: bool = False
    token_ids: list[int] = field(default_factory=list)
    """The response so far, in earlier requests too; kept only where a text may end it."""

    def take(self, message: Mapping[str, Any]) -> TokenDelta:
        """The new tokens of a message of the server; `is_over` afterwards if it ended."""
        facts = message["meta_info"]
        drawn = [(int(token), float(value)) for value, token, _ in facts["output_token_logprobs"]]
        if [token for token, _ in drawn] != message["output_ids"]:
            raise RuntimeError(
                f"SGLang sent tokens {message['output_ids']} of sample {facts['id']}, but "
                f"log-probabilities of {[token for token, _ in drawn]}; it is not the version that "
                "this protocol was written for, or --incremental-streaming-output is off"
            )
        stop_reason = stop_reason_of(facts)
        end = self._end_among([token for token, _ in drawn])
        if end is not None:
            drawn, stop_reason = drawn[:end], "stop"
        self.is_over = bool(stop_reason)
        return TokenDelta(
            sample=self.index,
            token_ids=tuple(token for token, _ in drawn),
            log_probs=tuple(value for _, value in drawn),
            policy_versions=(),
            stop_reason=stop_reason,
        )

    def _end_among(self, new: list[int]) -> int | None:
        """How many of the new tokens belong to the response if it ends with one of them."""
        ends = []
        if self.params.ignore_eos:
            ends = [i + 1 for i, token in enumerate(new) if token in self.params.stop_token_ids]
        if self.params.stop:
            self.token_ids += new
            total = tokens_until_stop(self.token_ids, len(new), self.params.stop, self.decode_text)
            if total is not None:
                ends.append(total - (len(self.token_ids) - len(new)))
        return min(ends, default=None)


def stop_reason_of(facts: Mapping[str, Any]) -> str:
    """`stop`, `length`, `abort`, or nothing while it runs. An abort with a status is SGLang's own
    refusal, for which nobody here asked."""
    reason = facts["finish_reason"]
    if reason is None:
        return ""
    if reason["type"] == "abort" and {"status_code": None, **reason}["status_code"] is not None:
        raise RuntimeError(f"SGLang gave sample {facts['id']} up: {reason}")
    return reason["type"]


WAIT_SECONDS = 0.02
"""How long `take` waits for a first message; calls to the engine are read in between."""


@dataclass
class Generation:
    """A request under way, and what it says to the server."""

    number: int
    body: Mapping[str, Any]
    samples: list[RunningSample]
    is_aborted: bool = False

    @property
    def is_over(self) -> bool:
        """Whether all samples have ended; the stream may still have to."""
        return all(sample.is_over for sample in self.samples)


@dataclass(frozen=True)
class StreamEnd:
    """The last that a thread passes on."""

    fault: Exception | None


class Streams:
    """All requests that the server works on, or will once a connection is free."""

    def __init__(self, server: Server, *, max_connections: int, max_silence_seconds: float) -> None:
        self._server = server
        self._max_connections = max_connections
        self._max_silence_seconds = max_silence_seconds
        self._arrived: queue.SimpleQueue[tuple[Generation, Any]] = queue.SimpleQueue()
        self._waiting: deque[Generation] = deque()
        self._connected: dict[int, Generation] = {}
        self._never_begun: list[Generation] = []  # aborted while they waited
        self._last_sign = time.monotonic()

    def is_waited_for(self) -> bool:
        """Whether any sample has not ended yet."""
        running = (not generation.is_over for generation in self._connected.values())
        return bool(self._waiting or self._never_begun) or any(running)

    def start(
        self,
        number: int,
        body: Mapping[str, Any],
        request: GenerationRequest,
        decode_text: Callable[[list[int]], str],
    ) -> None:
        if not self.is_waited_for():
            self._last_sign = time.monotonic()  # it had nothing to say before
        prompt_ids = list(request.prompt_ids)
        sampled = prompt_ids[len(prompt_ids) - request.num_sampled :]
        samples = [
            RunningSample(i, request.params, decode_text, token_ids=list(sampled))
            for i in range(request.num_samples)
        ]
        self._waiting.append(Generation(number, body, samples))
        self._connect()

    def abort(self, number: int) -> None:
        for generation in self._waiting:
            if generation.number == number:
                self._waiting.remove(generation)
                self._never_begun.append(generation)
                return
        generation = self._connected.get(number)
        if generation is None:  # it was aborted a moment ago, while it waited
            return
        generation.is_aborted = True
        for sample in generation.samples:
            if not sample.is_over:
                self._abort_sample(generation, sample)

    def take(self, weight_version: str) -> list[tuple[int, TokenDelta]]:
        """What has come; waits a moment for the first. All of it must be of `weight_version`."""
        deltas: list[tuple[int, TokenDelta]] = []
        for generation in self._never_begun:
            deltas += [(generation.number, aborted(sample)) for sample in generation.samples]
        self._never_begun = []
        for generation, message in self._messages(0.0 if deltas else WAIT_SECONDS):
            if isinstance(message, StreamEnd):
                self._end(generation, message.fault)
            else:
                deltas += self._deltas(generation, message, weight_version)
        return deltas

    def settle(self, seconds: float) -> None:
        """Wait until the server has ended all streams that ended here, so that it is idle."""
        assert not self.is_waited_for()
        deadline = time.monotonic() + seconds
        while self._connected:
            self.take("")
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"SGLang's server still works on {len(self._connected)} requests {seconds:g} "
                    f"seconds after they ended here; {self._server.stderr_tail()}"
                )

    # ---- messages ----------------------------------------------------------------------------

    def _connect(self) -> None:
        while self._waiting and len(self._connected) < self._max_connections:
            generation = self._waiting.popleft()
            self._connected[generation.number] = generation
            # A daemon: a stream that never ends must not keep the process from ending.
            threading.Thread(target=self._read, args=(generation,), daemon=True).start()

    def _read(self, generation: Generation) -> None:
        """In a thread of its own; `_end` decides how the stream ended."""
        fault: Exception | None = None
        try:
            for message in self._server.client.stream("/generate", generation.body):
                self._arrived.put((generation, message))
        except (OSError, http.client.HTTPException, ServerRefusedError) as error:
            fault = error
        finally:
            self._arrived.put((generation, StreamEnd(fault)))

    def _messages(self, seconds: float) -> Iterator[tuple[Generation, Any]]:
        try:
            yield self._arrived.get(timeout=seconds)
        except queue.Empty:
            self._check_silence()
            return
        self._last_sign = time.monotonic()
        for _ in range(self._arrived.qsize()):
            yield self._arrived.get(timeout=WAIT_SECONDS)

    def _deltas(
        self, generation: Generation, message: Mapping[str, Any], weight_version: str
    ) -> Iterator[tuple[int, TokenDelta]]:
        if "error" in message:
            raise RuntimeError(
                f"SGLang refused request {generation.number} after it was taken: {message['error']}"
            )
        sample = generation.samples[message["index"]]
        if sample.is_over:  # it ended here, by a text; the server hears of it a little later
            return
        if message["meta_info"]["weight_version"] != weight_version:
            raise RuntimeError(
                f"SGLang generated with weights {message['meta_info']['weight_version']!r}, but "
                f"{weight_version!r} were loaded last; somebody else updates this server"
            )
        delta = sample.take(message)
        has_ended_there = message["meta_info"]["finish_reason"] is not None
        if not has_ended_there and (sample.is_over or generation.is_aborted):
            # Again for each message: an abort that overtakes its request has no effect.
            self._abort_sample(generation, sample)
        yield generation.number, delta

    def _abort_sample(self, generation: Generation, sample: RunningSample) -> None:
        name = sample_name(generation.number, sample.index)
        self._server.client.call("/abort_request", {"rid": name})

    def _end(self, generation: Generation, fault: Exception | None) -> None:
        """Before all samples were over, the server is lost."""
        if not generation.is_over:
            raise RuntimeError(
                f"the stream of request {generation.number} broke off ({fault!r}); SGLang's "
                f"server: {self._server.stderr_tail()}"
            ) from fault
        del self._connected[generation.number]
        self._connect()

    def _check_silence(self) -> None:
        silence = time.monotonic() - self._last_sign
        if self._connected and silence > self._max_silence_seconds:
            raise RuntimeError(
                f"SGLang's server has sent nothing for {silence:.0f} seconds while "
                f"{len(self._connected)} requests run; rollout.server.timeout allows "
                f"{self._max_silence_seconds:g}: raise it if single steps take so long. "
                f"{self._server.stderr_tail()}"
            )


def aborted(sample: RunningSample) -> TokenDelta:
    return TokenDelta(
        sample=sample.index, token_ids=(), log_probs=(), policy_versions=(), stop_reason="abort"
    )

"""An engine that counts: small enough to say beforehand what it answers, and to break on purpose.

Token i of sample s is sum(prompt) + s + i + the sum of all weights; its log-probability is -i / 7
in fp32. Prompts with special tokens make it fail: see below. Runs where only torch is installed.
"""

import gc
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from verl.workers.rollout.base import GenerationRequest, TokenDelta
from verl.workers.rollout.process.hosted import EngineFacts, HostedEngine

REFUSED, BREAKS, HANGS = 400, 500, 600
ABSENT = ("transformers", "tensordict", "omegaconf", "hydra", "ray")
"""What an engine's environment need not have; `sitecustomize` of the tests makes them fail."""


def build(options: dict[str, Any]) -> "CountingEngine":
    found = [name for name in ABSENT if name in sys.modules]
    if found:
        raise RuntimeError(f"the host imported {found}")
    if not gc.isenabled():
        raise RuntimeError("the host has left the garbage collector disabled")
    if options.get("refuse"):
        raise ValueError("unknown option 'refuse'")
    if options.get("break"):
        raise KeyError("no such model")
    return CountingEngine(options)


class CountingEngine(HostedEngine):
    def __init__(self, options: dict[str, Any]) -> None:
        self._step_seconds = options.get("step_seconds", 0.0)
        self._running: dict[int, GenerationRequest] = {}
        self._aborted: set[int] = set()
        self._num_told: dict[int, int] = {}
        self._offset = 0
        self._can_pause = options.get("can_pause", True)
        self._num_forgotten = 0
        self._helper = None
        if options.get("starts_helper"):  # as vLLM starts workers
            self._helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

    def facts(self) -> EngineFacts:
        helper = "" if self._helper is None else str(self._helper.pid)
        return EngineFacts(
            name="counting",
            version=helper,
            log_probs="tempered",
            can_sleep=True,
            max_model_len=100_000,
            can_pause=self._can_pause,
        )

    def submit(self, number: int, request: GenerationRequest) -> None:
        if REFUSED in request.prompt_ids:
            raise ValueError(f"request {request.request_id} has token {REFUSED}")
        self._running[number] = request
        self._num_told[number] = 0

    def abort(self, number: int) -> None:
        self._aborted.add(number)

    def has_work(self) -> bool:
        return bool(self._running)

    def step(self) -> Sequence[tuple[int, TokenDelta]]:
        time.sleep(self._step_seconds)
        return [delta for number in list(self._running) for delta in self._next(number)]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._offset = int(sum(tensor.sum().item() for _, tensor in weights))

    def pause(self) -> Sequence[tuple[int, TokenDelta]]:
        return []

    def resume(self) -> None:
        pass

    def forget_cache(self) -> None:
        self._num_forgotten += 1

    def sleep(self, level: int) -> None:
        assert not self._running

    def wake_up(self) -> None:
        pass

    def close(self) -> None:
        print(f"closing after {self._num_forgotten} updates")

    def _next(self, number: int) -> list[tuple[int, TokenDelta]]:
        request, index = self._running[number], self._num_told[number]
        if BREAKS in request.prompt_ids:
            raise RuntimeError("a step broke")
        if HANGS in request.prompt_ids:
            time.sleep(600)
        is_aborted = number in self._aborted
        is_last = index + 1 == request.params.max_tokens
        if is_aborted or is_last:
            del self._running[number]
            self._aborted.discard(number)
        self._num_told[number] += 1
        return [
            (number, self._delta(request, sample, index, is_aborted, is_last))
            for sample in range(request.num_samples)
        ]

    def _delta(
        self, request: GenerationRequest, sample: int, index: int, is_aborted: bool, is_last: bool
    ) -> TokenDelta:
        tokens = () if is_aborted else (expected_token(request, sample, index, self._offset),)
        return TokenDelta(
            sample=sample,
            token_ids=tokens,
            log_probs=() if is_aborted else (expected_log_prob(index),),
            policy_versions=(),
            stop_reason="abort" if is_aborted else "length" if is_last else "",
        )


def expected_token(request: GenerationRequest, sample: int, index: int, offset: int) -> int:
    return sum(request.prompt_ids) + sample + index + offset


def expected_log_prob(index: int) -> float:
    return (torch.tensor(-float(index)) / 7).item()

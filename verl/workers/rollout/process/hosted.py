"""What an engine must offer to be hosted in a process of its own.

    trainer or server                      engine's process
      client.EngineProcess  <-- wire -->     host: reads calls, steps the engine, sends what came
                                               +-- HostedEngine (here): vLLM, the built-in one, ...

This file and what it imports run in the engine's environment, where only Python, torch and the
engine are certain to be installed. The host calls everything from one thread, so an engine needs no
locks; between two steps it reads new calls.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from verl.workers.rollout.base import GenerationRequest, TokenDelta


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """What an engine says of itself at its start; the capability probe checks what it can."""

    name: str
    """`vllm`, `sglang`, `native`, ..."""

    version: str
    log_probs: str
    """What is returned for a drawn token: `tempered` (softmax(logits / temperature) before any
    filter, as in training), `processed` (after the filters too) or `raw` (before temperature)."""

    can_sleep: bool
    max_model_len: int
    """Longest prompt plus response."""

    is_shared: bool = False
    """Whether it takes part in the weights of whoever started it, so that none are ever sent."""

    can_pause: bool = False
    """Whether weights may be replaced while requests run, which then go on with the new ones."""

    media: str = ""
    """How it takes images: `inputs` (what the tower is given), `files` (it has a processor of its
    own), or not at all."""

    keeps_cache: bool = False
    """Whether keys and values computed with older weights are used on (`kv_after_update=keep`)."""


class HostedEngine(ABC):
    """An engine that makes one step after another for the requests it has."""

    @abstractmethod
    def facts(self) -> EngineFacts:
        """What it is and can."""

    @abstractmethod
    def submit(self, number: int, request: GenerationRequest) -> None:
        """Take a request in under a number of the caller's. ValueError if it cannot run."""

    @abstractmethod
    def abort(self, number: int) -> None:
        """End a request: its samples' last deltas have `stop_reason` "abort"."""

    @abstractmethod
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""

    @abstractmethod
    def step(self) -> Sequence[tuple[int, TokenDelta]]:
        """Go on with all requests for a moment; the new tokens, with the requests' numbers.

        `policy_versions` of the deltas may be empty: the host fills in the version it has applied.
        """

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace all weights, given whole under their Hugging Face names; nothing is running, or
        `pause` was called before.

        Called with every tensor of an update that has been received and checked. Afterwards no key,
        value or prefix computed with older weights may be used, unless `keeps_cache`.
        """

    def cache_usage(self) -> float | None:
        """As `Rollout.cache_usage`; None if the engine does not report it."""
        return None

    def pause(self) -> Sequence[tuple[int, TokenDelta]]:
        """Stop between two steps, with requests that run (an engine that `can_pause`).

        The tokens that were computed and not yet told; `resume` follows when weights are loaded.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot pause")

    def resume(self) -> None:
        """Go on with all requests; `step` is called next."""
        raise NotImplementedError(f"{type(self).__name__} cannot pause")

    @abstractmethod
    def forget_cache(self) -> None:
        """Drop keys, values and prefixes that are kept for later requests."""

    def close_session(self, session_id: str) -> None:  # noqa: B027 (most keep nothing by its name)
        """Forget what is kept of a conversation, if anything is."""

    @abstractmethod
    def sleep(self, level: int) -> None:
        """Give memory back: 1 what generation needs beside the weights, 2 the weights too."""

    @abstractmethod
    def wake_up(self) -> None:
        """Take the memory again; after level 2 weights must be loaded before any request."""

    @abstractmethod
    def close(self) -> None:
        """Free everything; the process ends afterwards."""

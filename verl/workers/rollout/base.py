"""What a rollout engine does: token ids in; token ids, log-probabilities and weight versions out.

Text is no concern of an engine: chat templates and rewards are applied above, and ids are never
turned into text and back. A prompt and its `num_samples` continuations travel together, so that an
engine can run the prompt once; the turns of a conversation name their session, so that an engine
can keep what it computed for the turns before.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from verl.utils.media import Media
from verl.utils.registry import Registry

WAKE_SECONDS = 10.0
"""How often a thread that waits for an engine looks up."""


LOG_PROBS = ("processed", "raw")
KINDS = " or ".join(LOG_PROBS)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to continue a prompt."""

    temperature: float = 1.0
    """0 always takes the likeliest token; its log-probability is then that at temperature 1."""

    top_k: int = -1
    """Sample among the k likeliest tokens, and those as likely as the k-th; -1 or 0 among all."""

    top_p: float = 1.0
    """Sample among the fewest tokens whose probabilities reach this sum."""

    min_p: float = 0.0
    """Sample among tokens at least this share as likely as the likeliest."""

    repetition_penalty: float = 1.0
    """Divide positive logits of tokens seen before (multiply negative ones)."""

    log_probs: str = "processed"
    """`processed`: of the distribution that tokens are drawn from, after temperature, penalty and
    filters. `raw`: before penalty and filters, as in training. Equal where all of these are off.
    vLLM and SGLang have an option of their own for all requests."""

    max_tokens: int = 512
    """Most tokens to generate."""

    stop: tuple[str, ...] = ()
    """Texts that end the response; the token that completes one is the last."""

    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the response, beside the model's own; kept too."""

    ignore_eos: bool = False
    """Go on past the model's end-of-sequence tokens, for measurements of fixed length."""

    seed: int | None = None
    """Equal seeds give equal responses, whatever else runs at the same time."""

    @property
    def is_filtered(self) -> bool:
        """Whether some tokens are likelier or less likely than softmax(logits / temperature)."""
        has_filter = self.top_k > 0 or self.top_p < 1 or self.min_p > 0
        return has_filter or self.repetition_penalty != 1

    @property
    def renormalizes(self) -> bool:
        """Whether log-probs are not those of softmax(logits / temperature). The likeliest token is
        taken, not drawn: nothing is renormalized for it."""
        return self.is_filtered and self.log_probs == "processed" and self.temperature > 0

    def __post_init__(self) -> None:
        faults = [
            f"{name} is {value}; {rule}"
            for name, value, rule, holds in (
                ("temperature", self.temperature, "it must be 0 or more", self.temperature >= 0),
                ("top_k", self.top_k, "it must be -1 (off) or more", self.top_k >= -1),
                ("top_p", self.top_p, "it must be above 0 and at most 1", 0 < self.top_p <= 1),
                ("min_p", self.min_p, "it must be from 0 to 1", 0 <= self.min_p <= 1),
                ("max_tokens", self.max_tokens, "it must be 1 or more", self.max_tokens >= 1),
                (
                    "repetition_penalty",
                    self.repetition_penalty,
                    "it must be above 0",
                    self.repetition_penalty > 0,
                ),
                ("stop", self.stop, "it must be a tuple of texts", is_texts(self.stop)),
                ("log_probs", self.log_probs, f"it must be {KINDS}", self.log_probs in LOG_PROBS),
            )
            if not holds
        ]
        if faults:
            raise ValueError("; ".join(faults))


def is_texts(stop: object) -> bool:
    """Whether it is a collection of texts; one bare text would stop at each of its letters."""
    return isinstance(stop, tuple | list) and all(isinstance(s, str) and s for s in stop)


@dataclass(kw_only=True)
class TokenOutput:
    """One continuation of a prompt."""

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    """Log-probs of the kind that `SamplingParams.log_probs` names."""

    policy_versions: list[int] = field(default_factory=list)
    """Which weights each token was sampled with: `log_probs[i]` is what the weights of version
    `policy_versions[i]` give for token i after all tokens before it."""

    stop_reason: str = ""
    """`stop`, `length` or `abort`; empty while it runs."""

    routed_experts: np.ndarray | None = None
    """(tokens, layers, k) the experts of all tokens of prompt and response but the last, which no
    pass has seen; None where the engine does not record them."""

    num_preempted: int = 0
    """Times its keys and values were computed again: the weights changed while it ran, or their
    memory was needed by who came before."""

    first_token_seconds: float | None = field(default=None, compare=False)
    """Time from the arrival of the request at the engine to the first token of this sample; None
    before it, and where the engine delivers all tokens at once."""

    def add(self, delta: "TokenDelta") -> None:
        """Take in what has come of it."""
        self.token_ids += delta.token_ids
        self.log_probs += delta.log_probs
        self.policy_versions += delta.policy_versions
        self.stop_reason = delta.stop_reason
        self.num_preempted = delta.num_preempted
        self.routed_experts = delta.routed_experts

    def after(self, num_tokens: int, sample: int = 0) -> "TokenDelta":
        """All of it but the first tokens, as a delta of that sample."""
        return TokenDelta(
            sample=sample,
            token_ids=tuple(self.token_ids[num_tokens:]),
            log_probs=tuple(self.log_probs[num_tokens:]),
            policy_versions=tuple(self.policy_versions[num_tokens:]),
            stop_reason=self.stop_reason,
            num_preempted=self.num_preempted,
            routed_experts=self.routed_experts,
        )


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """A prompt and how often and how to continue it."""

    request_id: str
    prompt_ids: Sequence[int]
    params: SamplingParams
    num_samples: int = 1
    seeds: tuple[int, ...] | None = None
    """One seed per sample, each worth as much as `params.seed` of a request for it alone."""

    session_ids: tuple[str, ...] | None = None
    """One conversation per sample. Its next turn is a request whose prompt begins with the tokens
    of this one's prompt and response; an engine that still has these need not compute them."""

    num_sampled: int = 0
    """How many of the last prompt tokens are the beginning of the response: the request continues
    one that was cut. Token i after them is drawn as the token `num_sampled + i` of the response,
    and stop texts may begin in them, so with equal weights the built-in engine gives what the uncut
    request would have given (bit for bit in exact mode). `max_tokens` counts new tokens. vLLM and
    SGLang draw with other random numbers: their seed is derived from (seed, `num_sampled`)."""

    media: tuple[Media, ...] = ()
    """Images of the prompt, in order; their tokens are in `prompt_ids`, expanded."""


@dataclass(frozen=True, kw_only=True)
class TokenDelta:
    """What one sample of a request has got since the last delta of that sample."""

    sample: int
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    policy_versions: tuple[int, ...]
    stop_reason: str = ""
    """Set in the last delta of the sample, as in `TokenOutput`; empty before."""

    num_preempted: int = 0
    """So far, as in `TokenOutput`."""

    routed_experts: np.ndarray | None = None
    """Those of the whole sample, in its last delta, where the engine records them."""


OnEnd = Callable[[int, TokenOutput], None]
"""Called with the index of a sample and its output as the sample ends; it must be quick."""


class EngineLostError(RuntimeError):
    """An engine's process ended or stopped responding. Its unfinished requests produced nothing,
    so they may be submitted again, to this engine after its restart or to another."""


class Rollout(ABC):
    """An engine that continues prompts with the current weights of the policy.

    `submit`, `abort` and `close_session` may be called from any thread and do not block.
    """

    @property
    @abstractmethod
    def policy_version(self) -> int:
        """How many updates the weights in use have seen."""

    @property
    def num_restarts(self) -> int:
        """How often the engine was lost and started again."""
        return 0

    @property
    def cache_usage(self) -> float | None:
        """Share of the memory for keys and values that requests hold, as last known; None where
        the engine does not report it. Does not block."""
        return None

    def is_alive(self) -> bool:
        """Whether it can be asked; only an engine in a process of its own can be lost."""
        return True

    @abstractmethod
    def submit(
        self, request: GenerationRequest, on_end: OnEnd | None = None
    ) -> Future[list[TokenOutput]]:
        """Continue a prompt while other requests join and leave.

        The future resolves with all samples, or raises: ValueError for a request that cannot run,
        `EngineLostError` where it may be submitted again. Cancelling it aborts the request.
        `on_end` runs on a thread of the engine, before the future resolves.
        """

    def together(self) -> AbstractContextManager[None]:
        """Have the requests that this thread submits in the context enter the engine in one step.

        Those of one turn of an event loop do so anyway.
        """
        return nullcontext()

    async def generate(self, request: GenerationRequest) -> list[TokenOutput]:
        """Continue one prompt; a caller that is cancelled aborts its request."""
        return await asyncio.wrap_future(self.submit(request))

    def generate_batch(self, requests: Sequence[GenerationRequest]) -> list[list[TokenOutput]]:
        """Continue all prompts and return their samples, in the order of the requests."""
        with self.together():
            futures = [self.submit(request) for request in requests]
        try:
            unfinished = set(futures)
            while unfinished:  # the engine ends them all, if only with an error
                done, unfinished = wait(unfinished, WAKE_SECONDS, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result(timeout=0)
            return [future.result(timeout=0) for future in futures]
        finally:
            for future in futures:  # those that are left after an error
                future.cancel()

    @abstractmethod
    def abort(self, request_id: str) -> None:
        """Stop a request; it ends with the tokens it has and `stop_reason` "abort"."""

    @abstractmethod
    def close_session(self, session_id: str) -> None:
        """Free the keys and values kept for a session; an unknown one is no error."""

    @abstractmethod
    def sleep(self) -> None:
        """Free the memory for keys and values; no request may be unfinished."""

    @abstractmethod
    def wake_up(self) -> None:
        """Allocate that memory again."""

    def close(self) -> None:  # noqa: B027 (an engine without thread or process has nothing to end)
        """End its thread or its process; unfinished requests fail. May be called again."""


class StreamingRollout(Rollout):
    """An engine that also delivers tokens while a request runs."""

    @abstractmethod
    def stream(self, request: GenerationRequest) -> AsyncIterator[TokenDelta]:
        """The tokens of all samples as they come; a closed iterator aborts the request."""


class BaseRollout(ABC):
    """An engine as a worker of a recipe drives it: memory and weights; requests go elsewhere."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any = None) -> None:
        self.config = config
        self.model_config = model_config
        self.device_mesh = device_mesh

    @abstractmethod
    async def resume(self, tags: Sequence[str]) -> None:
        """Take memory again, for `weights` or for the `kv_cache`."""

    @abstractmethod
    async def update_weights(self, weights: Iterable[tuple[str, Any]], **kwargs: Any) -> Any:
        """Replace all weights, given whole under their Hugging Face names."""

    @abstractmethod
    async def release(self) -> None:
        """Give memory back."""


_PROCESS_ROLLOUT = "verl.workers.rollout.replica:EngineProcessRollout"
rollout_classes = Registry[type[BaseRollout]](
    "rollout", native_process=_PROCESS_ROLLOUT, vllm=_PROCESS_ROLLOUT, sglang=_PROCESS_ROLLOUT
)


def get_rollout_class(rollout_name: str, mode: str = "async") -> type[BaseRollout]:
    """The class for a `rollout.name` whose engine has a process of its own; it serves requests
    asynchronously in every `mode`."""
    return rollout_classes[rollout_name]

"""What the engines of a fleet have to do and have done, and the same for Prometheus."""

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from verl.utils.exposition import Family, Seconds
from verl.workers.rollout.base import GenerationRequest, OnEnd, Rollout, TokenOutput


@dataclass(eq=False)
class Slot:
    """One engine and its load."""

    index: int
    engine: Rollout
    outstanding: int = 0
    """Tokens of its requests, prompt and response, that may still have to be computed."""

    num_running: int = 0
    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    """Samples by stop reason."""

    seconds: Seconds = field(default_factory=Seconds)
    """From a request's submission to its last sample."""

    first_token: Seconds = field(default_factory=Seconds)
    """From a request's submission to the first token of each sample."""

    num_losses: int = 0
    num_unproductive_restarts: int = 0
    """Restarts since it last finished a request."""

    is_lost: bool = False
    failure: BaseException | None = None
    """Why it stays lost; None while it is in service or being recovered."""

    is_leaving: bool = False
    """It finishes the requests it has and gets no others."""

    @property
    def is_serving(self) -> bool:
        return not (self.is_lost or self.is_leaving)


@dataclass(eq=False)
class Job:
    """One submitted request, on its way through as many attempts as it takes."""

    request: GenerationRequest
    on_end: OnEnd | None
    future: "Future[list[TokenOutput]]" = field(default_factory=Future)
    num_attempts: int = 0
    ended: dict[int, TokenOutput] = field(default_factory=dict)
    slot: Slot | None = None
    """The engine that works on it."""

    outputs: "Future[list[TokenOutput]] | None" = None
    """What that engine will give."""

    is_aborted: bool = False
    is_submitted: bool = False
    knows_abort: bool = False  # its engine does
    submitting: threading.RLock = field(default_factory=threading.RLock)
    """Held while an engine is given the request or told to abort it: never in the other order."""

    num_losses: int = 0  # of the slot, when the request was given to it
    outstanding: int = 0
    submitted_at: float = field(default_factory=time.monotonic)


def fleet_families(
    slots: Sequence[Slot],
    running: Mapping[int, int],
    num_waiting: int,
    num_redispatched: int,
    model_name: str,
) -> list[Family]:
    def family(name: str, kind: str, meaning: str) -> Family:
        families.append(Family(name=name, kind=kind, meaning=meaning))
        return families[-1]

    families: list[Family] = []
    of_model = {"model_name": model_name}
    waits = family("vllm:num_requests_waiting", "gauge", "Samples that no engine has yet")
    waits.add(num_waiting, **of_model)
    runs = family("vllm:num_requests_running", "gauge", "Samples that an engine works on")
    prompts = family("vllm:prompt_tokens_total", "counter", "Prompt tokens given to an engine")
    tokens = family("vllm:generation_tokens_total", "counter", "Tokens that an engine generated")
    ended = family("vllm:request_success_total", "counter", "Samples that ended, by reason")
    seconds = family("vllm:e2e_request_latency_seconds", "histogram", "Time of a whole request")
    first = family(
        "vllm:time_to_first_token_seconds", "histogram", "Time to the first token of a sample"
    )
    cache = family(
        "vllm:kv_cache_usage_perc", "gauge", "Share of the KV cache in use; 1 is all of it"
    )
    outstanding = family(
        "verl_engine_outstanding_tokens", "gauge", "Tokens that an engine may still have to compute"
    )
    alive = family("verl_engine_alive", "gauge", "1 if an engine is in service")
    requests = family("verl_engine_requests_total", "counter", "Prompts given to an engine")
    lost = family("verl_engine_lost_total", "counter", "Times an engine was lost")
    for slot in slots:
        engine = {"engine": str(slot.index)}
        runs.add(running.get(slot.index, 0), **of_model, **engine)
        prompts.add(slot.num_prompt_tokens, **of_model, **engine)
        tokens.add(slot.num_generated_tokens, **of_model, **engine)
        for reason, count in sorted(slot.ended.items()):
            ended.add(count, **of_model, **engine, finished_reason=reason)
        slot.seconds.put(seconds, **of_model, **engine)
        slot.first_token.put(first, **of_model, **engine)
        usage = slot.engine.cache_usage
        if usage is not None:
            cache.add(usage, **of_model, **engine)
        outstanding.add(slot.outstanding, **engine)
        alive.add(int(not slot.is_lost), **engine)
        requests.add(slot.num_requests, **engine)
        lost.add(slot.num_losses, **engine)
    family("verl_redispatched_total", "counter", "Samples given to a second engine").add(
        num_redispatched
    )
    return families

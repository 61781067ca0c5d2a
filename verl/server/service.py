"""State that the routes share: fleet, tokenizer, admission, and how a request becomes a run.

    request --> [max_running run] <-- [max_waiting wait] <-- 429 with Retry-After

A route passes prompts and a request and gets deltas back. A request that leaves, for whatever
reason, gives its slot to the one that has waited longest.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from verl.server.answers import Usage
from verl.server.encoding import ClientImages, Encoder
from verl.server.errors import ApiError, busy
from verl.server.metrics import ServerMetrics
from verl.server.options import ServerOptions
from verl.server.runs import Deltas, Run
from verl.server.schemas import (
    MAX_CONTAINERS,
    MAX_VALUES,
    SMALL_BODY_BYTES,
    Form,
    SamplingRequest,
    parsed,
)
from verl.tools.parsers import ToolParser
from verl.utils.dataset.media import MediaEncoder
from verl.utils.media import Media
from verl.workers.rollout.base import (
    EngineLostError,
    GenerationRequest,
    Rollout,
    SamplingParams,
    StreamingRollout,
)
from verl.workers.rollout.fleet import Fleet
from verl.workers.rollout.process.client import EngineProcess

logger = logging.getLogger(__name__)

RESTART_PAUSE_SECONDS = 1.0


class Service:
    """One model, served; it belongs to the event loop on which it is used."""

    def __init__(
        self,
        rollouts: Sequence[StreamingRollout],
        tokenizer: PreTrainedTokenizerBase,
        options: ServerOptions,
        *,
        fleet: Fleet | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        processor: Any = None,
    ) -> None:
        """`processor` is that of a model which sees."""
        images = None
        if processor is not None:
            media = MediaEncoder(tokenizer, processor, max_images=options.max_images)
            images = ClientImages(media, options.allowed_local_media_path)
        self.options = options
        self.encoder = Encoder(
            tokenizer,
            options.max_model_len,
            options.vocabulary or len(tokenizer),
            template_kwargs,
            images,
        )
        self.fleet = fleet or Fleet(
            rollouts,
            recover=partial(restart, max_starts=options.max_restarts),
            max_restarts=options.max_restarts,
            keep_sessions=True,
        )
        self.call_parser = ToolParser.get_tool_parser(options.tool_call_parser, tokenizer)
        self.call_stop_ids = tuple(self.call_parser.stop_token_ids)
        """Tokens with which a turn ends that waits for a tool."""

        self.metrics = ServerMetrics(self.fleet)
        self.admission = Admission(options.max_running, options.max_waiting, self.metrics)
        self.created = int(time.time())
        self._parser = ThreadPoolExecutor(max_workers=1, thread_name_prefix="parser")

    def close(self) -> None:
        self.fleet.close()
        self.encoder.close()
        self._parser.shutdown(wait=False, cancel_futures=True)

    async def parsed(self, form: type[Form], body: bytes) -> Form:
        """The request in a body; one that is not small is parsed while others are answered."""
        if len(body) <= SMALL_BODY_BYTES:
            return parsed(form, body)
        longest = self.options.max_model_len + MAX_CONTAINERS
        parse = partial(parsed, form, body, max_values=max(MAX_VALUES, longest))
        return await asyncio.get_running_loop().run_in_executor(self._parser, parse)

    def check(self, request: SamplingRequest) -> None:
        """Refuse what only this server, with this model, cannot do."""
        if request.model != self.options.model:
            message = "there is no such model; /v1/models says which is served"
            raise ApiError(404, message, param="model", code="model_not_found")
        self.encoder.check_ids(request.stop_token_ids or (), "stop_token_ids")

    def run(self, job: "Job") -> Deltas:
        """The job on the engines; nothing is done before it is entered."""
        self.metrics.prompt_tokens.inc(sum(map(len, job.prompts)))
        return Run(
            self.fleet,
            [self._generation(job, number) for number in range(len(job.prompts))],
            self.metrics,
            is_streamed=job.request.stream,
            seconds=self.options.request_seconds,
        )

    def _generation(self, job: "Job", number: int) -> GenerationRequest:
        request, prompt = job.request, job.prompts[number]
        max_new_tokens = self.options.max_model_len - len(prompt)
        params = SamplingParams(
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            top_k=min(request.top_k, self.encoder.vocabulary),
            min_p=request.min_p,
            repetition_penalty=request.repetition_penalty,
            log_probs="raw",
            max_tokens=min(job.max_tokens or max_new_tokens, max_new_tokens),
            stop=request.stops,
            stop_token_ids=(*(request.stop_token_ids or ()), *job.stop_token_ids),
            ignore_eos=request.ignore_eos,
            seed=request.seed,
        )
        session = request.prompt_cache_key
        return GenerationRequest(
            request_id=f"{job.id}-{number}",
            prompt_ids=tuple(prompt),
            params=params,
            num_samples=request.n,
            session_ids=(session,) if session is not None and request.n == 1 else None,
            media=job.media,
        )


def restart(engine: Rollout, *, max_starts: int) -> None:
    """Start the process of a lost engine again; raises when `max_starts` starts have failed."""
    if not isinstance(engine, EngineProcess):
        raise EngineLostError(f"{type(engine).__name__} has no process that could be restarted")
    for attempt in range(1, max_starts + 1):
        try:
            return engine.restart()
        except (RuntimeError, OSError, ValueError) as error:
            logger.warning("an engine did not start: %s", error)
            if attempt == max_starts:
                raise
        time.sleep(RESTART_PAUSE_SECONDS * attempt)
    raise EngineLostError("an engine is not restarted (max_restarts is 0)")


@dataclass(frozen=True, kw_only=True)
class Job:
    """A request with its prompts as ids."""

    kind: str
    request: SamplingRequest
    prompts: list[list[int]]
    max_tokens: int | None
    """Per sample; None allows as many as fit."""

    media: tuple[Media, ...] = ()
    """Images of the only prompt."""

    stop_token_ids: tuple[int, ...] = ()
    """Further ids that end a sample, beside those of the request."""

    number: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def id(self) -> str:
        return f"{self.kind}-{self.number}"

    def usage(self, num_generated: int) -> Usage:
        num_prompt = sum(map(len, self.prompts))
        return Usage(
            prompt_tokens=num_prompt,
            completion_tokens=num_generated,
            total_tokens=num_prompt + num_generated,
        )


class Admission:
    """Admission control for requests of one event loop: a limit on running and on waiting ones."""

    def __init__(self, max_running: int, max_waiting: int, metrics: ServerMetrics) -> None:
        self._slots = asyncio.Semaphore(max_running)
        self._max_waiting = max_waiting
        self._metrics = metrics
        self.num_running = 0
        self.num_waiting = 0

    @asynccontextmanager
    async def admit(self) -> AsyncIterator[None]:
        """Wait until the request is admitted; it runs for the length of the `with` block."""
        await self._enter()
        try:
            yield
        finally:
            self.num_running -= 1
            self._slots.release()
            self._report()

    async def _enter(self) -> None:
        if self._slots.locked() and self.num_waiting >= self._max_waiting:
            raise busy(f"{self.num_waiting} requests are waiting already; try again later")
        self.num_waiting += 1
        try:
            await self._slots.__aenter__()
        finally:
            self.num_waiting -= 1
            self._report()
        self.num_running += 1
        self._report()

    def _report(self) -> None:
        self._metrics.running.set(self.num_running)
        self._metrics.waiting.set(self.num_waiting)

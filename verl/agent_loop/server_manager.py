"""Which engine continues which prompt, for agent loops that know nothing of engines.

    loop.run --generate--> ticket --+
    loop.run --generate--> ticket --+--> one request per prompt --> the engine with least to do
    loop.run --generate--> ticket --+    (all tickets of one turn of the event loop)

Samples of the same prompt ask one by one; those that ask in the same turn of the event loop
travel as one request, so that an engine computes the prompt once. Each sample has a seed of its
own, so its tokens are the same whether it travels alone or with others. A later request of the
same id goes to the engine that served it before, which may still hold its keys and values.

A request whose engine is lost has got nothing yet, so it is asked again, of another engine or of
the same one after its recovery (`fleet`); whoever waits gets one answer.
"""

import asyncio
import dataclasses
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from verl.agent_loop.fleet import Fleet, Recover
from verl.single_controller.base.failures import WorkerError
from verl.utils.rollout_trace import rollout_trace_op
from verl.workers.rollout.base import (
    EngineLostError,
    GenerationRequest,
    Rollout,
    SamplingParams,
    TokenOutput,
)

IGNORED_PARAMS = {"logprobs"}
"""Log-probabilities always come back."""

sampled_turns: ContextVar[list[TokenOutput] | None] = ContextVar("sampled_turns", default=None)
"""Set by whoever runs an agent loop: what engines sample for it is added, turn by turn."""

PARAM_NAMES = {field.name for field in dataclasses.fields(SamplingParams)}


@dataclass(frozen=True)
class Ticket:
    """One sample that somebody waits for."""

    request_id: str
    seed: int | None
    answer: "asyncio.Future[TokenOutput]"


GroupKey = tuple[int | None, tuple[int, ...], SamplingParams, bool]


class AsyncLLMServerManager:
    """Sends prompts to `server_handles`, which are `Rollout`s.

    `config` is the whole configuration; responses are at most `rollout.response_length` tokens,
    unless a request's own parameters say less. The engines of the last `max_cache_size` requests
    are remembered. `recover` starts an engine again that is lost.
    """

    def __init__(
        self,
        config: Any,
        server_handles: Sequence[Rollout],
        max_cache_size: int = 10000,
        *,
        recover: Recover | None = None,
    ) -> None:
        self.config = config
        self.server_handles = list(server_handles)
        self.max_cache_size = max_cache_size
        self.num_redispatched = 0  # samples
        self._fleet = Fleet(self.server_handles, recover)
        self._engine_of: OrderedDict[str, int] = OrderedDict()
        self._waiting: dict[GroupKey, list[Ticket]] = {}
        self._requests: set[asyncio.Task[None]] = set()

    @rollout_trace_op
    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        image_data: Sequence[Any] | None = None,
        video_data: Sequence[Any] | None = None,
    ) -> TokenOutput:
        """Continue a prompt once."""
        if image_data or video_data:
            raise ValueError("images and videos need an engine that reads them; this one does not")
        params = self.sampling_params(sampling_params)
        loop = asyncio.get_running_loop()
        ticket = Ticket(request_id, params.seed, loop.create_future())
        key = (
            self._engine_of.get(request_id),
            tuple(prompt_ids),
            dataclasses.replace(params, seed=None),
            params.seed is None,
        )
        if not self._waiting:
            loop.call_soon(self._send)  # runs after everything that is ready now
        self._waiting.setdefault(key, []).append(ticket)
        output = await ticket.answer
        turns = sampled_turns.get()
        if turns is not None:
            turns.append(output)
        return output

    def sampling_params(self, given: Mapping[str, Any]) -> SamplingParams:
        """Check and complete the parameters that a loop passes."""
        stated = {name: value for name, value in given.items() if name not in IGNORED_PARAMS}
        if "max_new_tokens" in stated:
            stated["max_tokens"] = stated.pop("max_new_tokens")
        unknown = sorted(stated.keys() - PARAM_NAMES)
        if unknown:
            raise ValueError(
                f"unknown sampling parameters {unknown}; known: {', '.join(sorted(PARAM_NAMES))}"
            )
        for name in ("stop", "stop_token_ids"):
            if name in stated:
                value = stated[name]
                stated[name] = (value,) if isinstance(value, str) else tuple(value or ())
        longest = self.config.actor_rollout_ref.rollout.response_length
        stated["max_tokens"] = min(stated.get("max_tokens") or longest, longest)
        return SamplingParams(**stated)

    def _send(self) -> None:
        groups, self._waiting = self._waiting, {}
        for (engine, prompt_ids, params, _), tickets in groups.items():
            for part in self._parts(tickets):
                task = asyncio.create_task(self._request(engine, prompt_ids, params, part))
                self._requests.add(task)
                task.add_done_callback(self._requests.discard)

    def _parts(self, tickets: list[Ticket]) -> list[list[Ticket]]:
        """An engine takes a group as a whole, so a group must fit into it."""
        most = self.config.actor_rollout_ref.rollout.max_num_seqs
        return [tickets[start : start + most] for start in range(0, len(tickets), most)]

    async def _request(
        self,
        engine: int | None,
        prompt_ids: tuple[int, ...],
        params: SamplingParams,
        part: list[Ticket],
    ) -> None:
        seeds = tuple(ticket.seed for ticket in part if ticket.seed is not None)
        request = GenerationRequest(
            request_id=part[0].request_id,
            prompt_ids=prompt_ids,
            params=params,
            num_samples=len(part),
            seeds=seeds or None,
        )
        try:
            engine, outputs = await self._ask(engine, request)
        except BaseException as error:
            for ticket in part:
                if not ticket.answer.done():
                    ticket.answer.set_exception(_for_ticket(error, ticket))
            if not isinstance(error, Exception):
                raise
            return
        for ticket, output in zip(part, outputs, strict=True):
            self._remember(ticket.request_id, engine)
            if not ticket.answer.done():
                ticket.answer.set_result(output)

    async def _ask(
        self, preferred: int | None, request: GenerationRequest
    ) -> tuple[int, list[TokenOutput]]:
        """The answer, and whose it is; at most `rollout.server.max_attempts` engines are lost."""
        num_attempts = self.config.actor_rollout_ref.rollout.server.max_attempts
        for attempt in range(1, num_attempts + 1):
            engine = await self._fleet.choose(preferred)
            try:
                with self._fleet.asking(engine, request):
                    return engine, await self.server_handles[engine].generate(request)
            except EngineLostError:
                if attempt == num_attempts:
                    raise
            self.num_redispatched += request.num_samples
        raise AssertionError("an attempt returns or raises")

    def _remember(self, request_id: str, engine: int) -> None:
        self._engine_of[request_id] = engine
        self._engine_of.move_to_end(request_id)
        while len(self._engine_of) > self.max_cache_size:
            self._engine_of.popitem(last=False)


def _for_ticket(error: BaseException, ticket: Ticket) -> Exception:
    # The request is at fault, or a worker or an engine is; either message says how.
    if isinstance(error, ValueError | WorkerError | EngineLostError):
        return error
    return RuntimeError(f"request {ticket.request_id} failed: {error!r}")

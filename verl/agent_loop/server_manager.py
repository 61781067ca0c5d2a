"""`AsyncLLMServerManager`: prompts of agent loops, sample by sample, on a fleet of engines.

    loop.run --generate--> ticket --+
    loop.run --generate--> ticket --+--> one request per prompt --> Fleet.submit
    loop.run --generate--> ticket --+    (all tickets of one turn of the event loop)

Samples of the same prompt are asked for one by one; those of the same turn of the event loop travel
as one request, so that an engine computes the prompt once. Each sample has a seed of its own, so
its tokens do not depend on the others. The request id names the session: the engine that served its
last turn may still hold its keys and values, and is preferred.

Engines report samples as they end, on threads of their own. A mailbox hands all that have come to
the event loop in one callback.
"""

import asyncio
import dataclasses
import logging
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from verl.agent_loop.gate import gated_row
from verl.single_controller.base.failures import WorkerError
from verl.utils.media import Media, hash_of_all
from verl.utils.rollout_trace import rollout_trace_op
from verl.workers.rollout.base import (
    EngineLostError,
    GenerationRequest,
    OnEnd,
    Rollout,
    SamplingParams,
    TokenDelta,
    TokenOutput,
)
from verl.workers.rollout.fleet import Fleet, Recover

logger = logging.getLogger(__name__)

IGNORED_PARAMS = {"logprobs"}
"""Log-probabilities always come back."""


@dataclass(eq=False)
class SampledTurns:
    """What engines sampled for one trajectory, and the session it was sampled in."""

    outputs: list[TokenOutput] = field(default_factory=list)
    session_id: str | None = None


sampled_turns: ContextVar[SampledTurns | None] = ContextVar("sampled_turns")
"""Set by whoever runs an agent loop: what engines sample for it is added, turn by turn."""

MAX_PARAMS = 1000
MAX_CALLS = 1000
COLLECT_SECONDS = 0.001
"""Samples that end in one step of an engine come one by one, within less than this."""

PARAM_NAMES = {field.name for field in dataclasses.fields(SamplingParams)}


@dataclass(eq=False)
class Ticket:
    """One sample that a loop awaits."""

    request_id: str
    seed: int | None
    answer: "asyncio.Future[TokenOutput]"
    media: tuple[Media, ...] = ()
    call: "Call | None" = None
    """The request it travels with; None until it is sent."""

    def resolve(self, answer: "TokenOutput | BaseException") -> None:
        if self.answer.done():
            return
        if isinstance(answer, BaseException):
            self.answer.set_exception(error_of_request(answer, self.request_id))
        else:
            self.answer.set_result(answer)


@dataclass(eq=False)
class Call:
    """A request in flight and the tickets it serves."""

    tickets: list[Ticket]
    outputs: "Future[list[TokenOutput]]"


FindMedia = Callable[[list[int], Sequence[Any]], tuple[Media, ...]]
GroupKey = tuple[int | None, tuple[int, ...], SamplingParams, bool, int, str]


class AsyncLLMServerManager:
    """Sends prompts to `server_handles`, which are `Rollout`s, or to a `fleet` of them.

    `config` is the whole configuration; responses are at most `rollout.response_length` tokens,
    unless a request's own parameters say less. The engines of the last `max_cache_size` sessions
    are remembered. `recover` restarts a lost engine.
    """

    def __init__(
        self,
        config: Any,
        server_handles: Sequence[Rollout],
        max_cache_size: int = 10000,
        *,
        recover: Recover | None = None,
        fleet: Fleet | None = None,
    ) -> None:
        self.config = config
        rollout = config.actor_rollout_ref.rollout
        self.fleet = fleet or Fleet(
            server_handles,
            recover=recover,
            max_attempts=rollout.server.max_attempts,
            max_sticky=max_cache_size,
            keep_sessions=rollout.multi_turn.enable,
        )
        self._max_response_tokens: int = rollout.response_length
        self._max_num_seqs: int = rollout.max_num_seqs
        self._params: dict[tuple[tuple[str, Any], ...], SamplingParams] = {}
        self._waiting: dict[GroupKey, list[Ticket]] = {}
        self._mailbox: Mailbox | None = None
        self._calls: list[Call] = []
        self.find_media: FindMedia | None = None
        """Finds images, given in order, in ids that hold their tokens; None without a processor."""

    @property
    def server_handles(self) -> list[Rollout]:
        """The engines; they may join and leave."""
        return self.fleet.engines

    @property
    def num_redispatched(self) -> int:
        """Samples that were given to a second engine because the first was lost."""
        return self.fleet.num_redispatched

    @rollout_trace_op
    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        image_data: Sequence[Any] | None = None,
        video_data: Sequence[Any] | None = None,
        media: tuple[Media, ...] = (),
    ) -> TokenOutput:
        """Continue a prompt once; where weights change meanwhile, as the gate of the row says.

        `media` are the images of the prompt, with their places. `image_data` are images alone,
        which must be as many as the prompt has tokens for, in their order.
        """
        if video_data:
            raise ValueError("videos are not given to engines; give their frames as images")
        if image_data and not media:
            if self.find_media is None:
                raise ValueError("images need a model that sees; this one has no processor")
            media = await asyncio.to_thread(self.find_media, list(prompt_ids), image_data)
        params, seed = self._shared_params(sampling_params)
        row = gated_row.get(None)
        if row is None:
            output = await self._ask(request_id, tuple(prompt_ids), params, seed, media=media)
        else:
            prompt = tuple(prompt_ids)

            def ask(sampled: list[int], room: int) -> Awaitable[TokenOutput]:
                limited = dataclasses.replace(params, max_tokens=room)
                ids = (*prompt, *sampled)
                return self._ask(request_id, ids, limited, seed, len(sampled), media=media)

            output = await row.gate.turn(row, ask, params.max_tokens)
        self._note(request_id, output)
        return output

    async def stream(
        self, request_id: str, *, prompt_ids: Sequence[int], sampling_params: Mapping[str, Any]
    ) -> AsyncGenerator[TokenDelta, None]:
        """Continue a prompt once and give its tokens as they come.

        They come all at the end where engines do not stream, and in an asynchronous run, in which
        a row may be cut back. When the engine is lost, the turn is sampled again with its seed;
        what was given stays true, or this raises `EngineLostError`.
        """
        params, seed = self._shared_params(sampling_params)
        output = TokenOutput()
        if self.fleet.can_stream and gated_row.get(None) is None:
            request = GenerationRequest(
                request_id=request_id,
                prompt_ids=tuple(prompt_ids),
                params=params,
                seeds=None if seed is None else (seed,),
                session_ids=(request_id,),
            )
            try:
                async with aclosing(self.fleet.stream(request)) as deltas:
                    async for delta in deltas:
                        output.add(delta)
                        yield delta
            except EngineLostError:
                logger.warning("request %s is sampled again: its engine was lost", request_id)
        if output.stop_reason:
            self._note(request_id, output)
            return
        whole = await self.generate(
            request_id, prompt_ids=prompt_ids, sampling_params=sampling_params
        )
        num_given = len(output.token_ids)
        if whole.token_ids[:num_given] != output.token_ids:
            raise EngineLostError(
                f"the engine of request {request_id} was lost after {num_given} tokens, which are "
                "others now that they are sampled again; send the request again"
            )
        yield whole.after(num_given)

    def _note(self, request_id: str, output: TokenOutput) -> None:
        turns = sampled_turns.get(None)
        if turns is not None:
            turns.outputs.append(output)
            turns.session_id = request_id

    async def _ask(
        self,
        request_id: str,
        prompt_ids: tuple[int, ...],
        params: SamplingParams,
        seed: int | None,
        num_sampled: int = 0,
        media: tuple[Media, ...] = (),
    ) -> TokenOutput:
        """One request, together with those for the same prompt; the last `num_sampled` ids of the
        prompt are the beginning of the turn."""
        loop = asyncio.get_running_loop()
        ticket = Ticket(request_id, seed, loop.create_future(), media)
        engine = self.fleet.engine_of(request_id)
        key = (engine, prompt_ids, params, seed is None, num_sampled, hash_of_all(media))
        if not self._waiting:
            loop.call_soon(self._send)  # runs after everything that is ready now
        self._waiting.setdefault(key, []).append(ticket)
        try:
            return await ticket.answer
        except asyncio.CancelledError:
            call = ticket.call
            if call is not None and all(one.answer.done() for one in call.tickets):
                call.outputs.cancel()  # which aborts the request
            raise

    def abort_turns(self) -> None:
        """End all turns in flight with what they have; on the event loop."""
        self._send()  # those that are about to be sent too
        calls = [call for call in self._calls if not call.outputs.done()]
        self.fleet.abort([call.tickets[0].request_id for call in calls])

    async def generate_group(
        self,
        request_ids: Sequence[str],
        *,
        prompt_ids: Sequence[int],
        sampling_params: Sequence[Mapping[str, Any]],
        on_end: Callable[[int, TokenOutput], None],
        media: tuple[Media, ...] = (),
    ) -> None:
        """Continue a prompt once for each request id, with parameters that differ in the seed only.

        `on_end` is called on the event loop with each sample as it ends; if it raises, so does
        this.
        """
        loop = asyncio.get_running_loop()
        mailbox = self._mailbox_of(loop)
        all_ended: asyncio.Future[None] = loop.create_future()
        ended: set[int] = set()

        def end(sample: int, answer: TokenOutput | BaseException) -> None:
            if all_ended.done() or sample in ended:
                return
            if isinstance(answer, BaseException):
                all_ended.set_exception(error_of_request(answer, request_ids[sample]))
                return
            ended.add(sample)
            try:
                on_end(sample, answer)
            except Exception as error:
                all_ended.set_exception(error)
                return
            if len(ended) == len(request_ids):
                all_ended.set_result(None)

        params, first_seed = self._shared_params(sampling_params[0])
        seeds = None if first_seed is None else [stated["seed"] for stated in sampling_params]
        works: list[Future[list[TokenOutput]]] = []
        for start in range(0, len(request_ids), self._max_num_seqs):
            part = slice(start, start + self._max_num_seqs)
            request = GenerationRequest(
                request_id=request_ids[start],
                prompt_ids=tuple(prompt_ids),
                params=params,
                num_samples=len(request_ids[part]),
                seeds=None if seeds is None else tuple(seeds[part]),
                session_ids=tuple(request_ids[part]),
                media=media,
            )
            has_ended, is_done = mailbox.callbacks(request, partial(end_from, end, start))
            works.append(self.fleet.submit(request, has_ended))
            works[-1].add_done_callback(is_done)
        try:
            await all_ended
        except asyncio.CancelledError:
            for work in works:
                work.cancel()  # which aborts the request
            raise

    def close_session(self, request_id: str) -> None:
        """Let the engine of the session drop what it keeps for it."""
        self.fleet.close_session(request_id)

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
        longest = self._max_response_tokens
        stated["max_tokens"] = min(stated.get("max_tokens") or longest, longest)
        return SamplingParams(**stated)

    def _shared_params(self, stated: Mapping[str, Any]) -> tuple[SamplingParams, int | None]:
        """The checked parameters without the seed, made once for all samples alike; the seed."""
        key = tuple(
            (name, tuple(value) if isinstance(value, list) else value)
            for name, value in stated.items()
            if name != "seed"
        )
        params = self._params.get(key)
        if params is None:
            if len(self._params) >= MAX_PARAMS:
                self._params.clear()
            params = self.sampling_params({name: stated[name] for name, _ in key})
            self._params[key] = params
        return params, stated.get("seed")

    def _send(self) -> None:
        mailbox = self._mailbox_of(asyncio.get_running_loop())
        groups, self._waiting = self._waiting, {}
        if len(self._calls) > MAX_CALLS:  # most have ended
            self._calls = [call for call in self._calls if not call.outputs.done()]
        for (_, prompt_ids, params, _, num_sampled, _), tickets in groups.items():
            # An engine takes a group as a whole, so a group must fit into it.
            for start in range(0, len(tickets), self._max_num_seqs):
                part = tickets[start : start + self._max_num_seqs]
                self._submit(prompt_ids, params, part, mailbox, num_sampled)

    def _mailbox_of(self, loop: asyncio.AbstractEventLoop) -> "Mailbox":
        if self._mailbox is None or self._mailbox.loop is not loop:
            self._mailbox = Mailbox(loop)
        return self._mailbox

    def _submit(
        self,
        prompt_ids: tuple[int, ...],
        params: SamplingParams,
        tickets: list[Ticket],
        mailbox: "Mailbox",
        num_sampled: int,
    ) -> None:
        request = GenerationRequest(
            request_id=tickets[0].request_id,
            prompt_ids=prompt_ids,
            params=params,
            num_samples=len(tickets),
            seeds=tuple(ticket.seed for ticket in tickets if ticket.seed is not None) or None,
            session_ids=tuple(ticket.request_id for ticket in tickets),
            num_sampled=num_sampled,
            media=tickets[0].media,
        )
        has_ended, is_done = mailbox.callbacks(request, lambda n, a: tickets[n].resolve(a))
        outputs = self.fleet.submit(request, has_ended)
        outputs.add_done_callback(is_done)
        call = Call(tickets, outputs)
        for ticket in tickets:
            ticket.call = call
        self._calls.append(call)


class Mailbox:
    """Hands what engine threads report to the event loop: one callback for all that has come."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._arrived: list[tuple[Deliver, int, Answer]] = []
        self._lock = threading.Lock()

    def callbacks(
        self, request: GenerationRequest, deliver: "Deliver"
    ) -> "tuple[OnEnd, Callable[[Future[list[TokenOutput]]], None]]":
        """What to call as a sample ends and when the future of the request is done.

        Then `deliver(sample, answer)` is called on the event loop, for each sample at least once,
        with its output or with the error of the request.
        """

        def end(sample: int, output: TokenOutput) -> None:
            self._put([(deliver, sample, output)])

        def finish(outputs: "Future[list[TokenOutput]]") -> None:
            if outputs.cancelled():
                return  # nobody waits
            error = outputs.exception(timeout=0)
            num = request.num_samples
            answers = [error] * num if error is not None else outputs.result(timeout=0)
            self._put([(deliver, sample, answer) for sample, answer in enumerate(answers)])

        return end, finish

    def _put(self, items: "list[tuple[Deliver, int, Answer]]") -> None:
        with self._lock:
            is_first = not self._arrived
            self._arrived += items
        if is_first:
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                self.loop.call_soon_threadsafe(self.loop.call_later, COLLECT_SECONDS, self._deliver)

    def _deliver(self) -> None:
        with self._lock:
            arrived, self._arrived = self._arrived, []
        for deliver, sample, answer in arrived:
            deliver(sample, answer)


Answer = TokenOutput | BaseException
Deliver = Callable[[int, Answer], None]


def end_from(end: Deliver, start: int, sample: int, answer: Answer) -> None:
    """`end` for the samples of a request that begins with sample `start` of its group."""
    end(start + sample, answer)


def error_of_request(error: BaseException, request_id: str) -> Exception:
    # The request is at fault, or a worker or an engine is; either message says how.
    if isinstance(error, ValueError | WorkerError | EngineLostError):
        return error
    return RuntimeError(f"request {request_id} failed: {error!r}")

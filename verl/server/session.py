"""One program's calls: each is placed in the session's tree, encoded, sampled and recorded.

    history --Tree.place--> parent turn --after_turn--> ids --engine--> the next turn, recorded

The chat code of the server reads what was sampled (`SessionService.run`), so text and tool calls
are the ones that it would have given.
"""

import asyncio
import contextvars
import hashlib
import json
import logging
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import anyio
from pydantic_core import from_json

from verl.agent_loop.server_manager import AsyncLLMServerManager
from verl.server import answers
from verl.server.chat import ChatAnswer
from verl.server.errors import ApiError, too_slow
from verl.server.forms import check_tool_replies
from verl.server.options import ServerOptions
from verl.server.runs import Deltas, api_error
from verl.server.schemas import MAX_VALUES, SMALL_BODY_BYTES, ChatRequest, check_size
from verl.server.service import Job, Service
from verl.server.tree import Budget, ModelTurn, Place, Tree, derived_seed, too_long
from verl.utils.dataset.continuation import CannotContinue
from verl.workers.rollout.base import EngineLostError, TokenDelta, TokenOutput

logger = logging.getLogger(__name__)

MODEL = "policy"
"""The name under which the model is served; any other name is taken too."""

CLOSE_SECONDS = 30.0
"""Time for engines to abort the requests of a session that ends."""


@dataclass(frozen=True, kw_only=True)
class TurnJob(Job):
    """A request with its place in a session."""

    request: ChatRequest
    session: "Session"
    places: list[Place]
    outputs: list[TokenOutput] = field(default_factory=list)
    """What the engine gave for each place."""


@dataclass(eq=False, kw_only=True)
class RecordedCall:
    """A request and what became of it."""

    request: ChatRequest
    turns: list[ModelTurn] = field(default_factory=list)
    ended: int = -1
    """How many calls had been answered before."""


class Session:
    """The calls of one program."""

    def __init__(
        self,
        name: str,
        sampling_params: Mapping[str, Any],
        service: "SessionService",
        *,
        url: str,
        key: str,
        max_calls: int,
    ) -> None:
        self.name = name
        self.url = url
        self.key = key
        """What the program shows; it opens no other session."""

        self.tree = Tree(name, service.budget)
        self.remembered: dict[str, list[dict[str, Any]]] = {}
        """Conversations by the id of their last response, for `previous_response_id`."""

        self.fault: str | None = None
        """What of ours failed; the program cannot be blamed for what followed."""

        self.num_calls = 0
        self.calls: list[RecordedCall] = []
        """In the order in which they came; those that came to nothing are left out."""

        self.tasks: set[asyncio.Task[Any]] = set()
        self.context = contextvars.copy_context()
        self.request_seconds = service.options.request_seconds
        self._service = service
        self._params = dict(sampling_params)
        self._seed: int | None = self._params.pop("seed", None)
        self._max_calls = max_calls

    def environment(self) -> dict[str, str]:
        """What an agent program finds in its environment."""
        return {
            "OPENAI_BASE_URL": f"{self.url}/v1",
            "OPENAI_API_KEY": self.key,
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": self.key,
            "VERL_MODEL": MODEL,
        }

    async def answer(self, request: ChatRequest) -> tuple[answers.ChatCompletion, list[ModelTurn]]:
        """Sample the next turn of a conversation and record it."""
        answering = Answering(self, request)
        return await answering.whole(), answering.turns

    @asynccontextmanager
    async def recording(
        self, request: ChatRequest, turns: list[ModelTurn]
    ) -> AsyncIterator[ChatAnswer]:
        """Place a request in the tree; what was sampled for it in the context is recorded at its
        end, and added to `turns`."""
        if self.num_calls >= self._max_calls:
            message = f"the session has made {self.num_calls} calls; max_calls allows no more"
            raise ApiError(400, message, code="too_many_calls")
        check_tool_replies(request.messages)
        tools = "".join(tool.model_dump_json() for tool in request.offered_tools)
        place = self.tree.place(request.messages, tools)
        places = [place]
        call = RecordedCall(request=request)
        self.calls.append(call)
        try:
            job = await self._job(request, places)
            start = time.perf_counter()
            answer = ChatAnswer(
                self._service, request, job, call_id=lambda n, call: call_id(places[n].path, call)
            )
            yield answer
            seconds = time.perf_counter() - start
        except BaseException as error:
            for one in places:
                self.tree.release(one)
            self.calls.remove(call)
            if isinstance(error, ApiError) and error.status >= 500:
                self.fault = error.message
            raise
        choices = answer.completion().choices
        for one, output, choice in zip(places, job.outputs, choices, strict=True):
            turns.append(self.tree.record(one, output, choice.message, seconds))
        call.turns, call.ended = turns, self.num_calls
        self.num_calls += 1
        self.fault = None

    def recorded(self) -> dict[str, Any]:
        """What was asked, as plain data; a message that many calls repeat is in it once."""
        messages: dict[str, int] = {}
        calls = []
        for call in self.calls:
            asked = call.request.model_dump(mode="json", exclude_unset=True)
            texts = [json.dumps(message) for message in asked.pop("messages")]
            calls.append(
                {
                    "request": asked,
                    "messages": [messages.setdefault(text, len(messages)) for text in texts],
                    "path": list(call.turns[0].path),
                    "delivered": [turn.is_delivered for turn in call.turns],
                    "ended": call.ended,
                }
            )
        return {"messages": [json.loads(text) for text in messages], "calls": calls}

    async def ask_again(self, record: Mapping[str, Any]) -> str | None:
        """Make the calls of a record, without its program; why they do not become what they were,
        or None. What the model says follows from the seeds."""
        messages, calls = record["messages"], record["calls"]
        for call in calls:
            asked = {**call["request"], "messages": [messages[n] for n in call["messages"]]}
            _, turns = await self.answer(ChatRequest.model_validate(asked))
            if list(turns[0].path) != call["path"]:
                return f"a call was turn {call['path']} of its session and is now {turns[0].path}"
            for turn, is_delivered in zip(turns, call["delivered"], strict=True):
                if not is_delivered:
                    self.tree.abandon(turn)
        ended = {
            id(turn): old["ended"]
            for call, old in zip(self.calls, calls, strict=True)
            for turn in call.turns
        }
        self.tree.turns.sort(key=lambda turn: ended[id(turn)])
        return None

    async def _job(self, request: ChatRequest, places: list[Place]) -> TurnJob:
        encoder, (place,) = self._service.encoder, places
        before = [] if place.parent is None else place.parent.ids()
        if place.parent is not None:
            try:
                place.new_ids = await encoder.after_turn(
                    place.parent.output.token_ids,
                    place.messages,
                    place.num_known,
                    request.offered_tools,
                )
            except CannotContinue as error:
                logger.info("session %s: %s", self.name, error)
                is_rewritten = place.fork == "history_rewritten"
                fork = "history_rewritten" if is_rewritten else "template_cannot_continue"
                self.tree.begin_again(place, fork)
                before = []
        if place.parent is None:
            place.new_ids = await encoder.conversation(request)
        prompt_ids = [*before, *place.new_ids]
        line = [] if place.parent is None else place.parent.line()
        num_root = len(line[0].new_ids if line else place.new_ids)
        budget = self._service.budget
        room = budget.room(num_root, len(prompt_ids))
        if room < 1:
            raise too_long(len(prompt_ids), budget)
        limits = [n for n in (request.max_tokens, request.max_completion_tokens) if n is not None]
        places += [self.tree.sibling(place) for _ in range(request.n - 1)]
        return TurnJob(
            kind="chatcmpl",
            request=request,
            prompts=[prompt_ids],
            max_tokens=min([room, *limits]),
            session=self,
            places=places,
        )

    async def sample(self, job: TurnJob, place: Place) -> AsyncGenerator[TokenDelta, None]:
        """One continuation, with the parameters of the training; in one piece unless the client
        wants a stream."""
        params = {
            **self._params,
            "max_tokens": job.max_tokens,
            "stop": (*(self._params.get("stop") or ()), *job.request.stops),
            "stop_token_ids": (
                *(self._params.get("stop_token_ids") or ()),
                *(self._service.call_stop_ids if job.request.offered_tools else ()),
            ),
        }
        seed = derived_seed(self._seed, place.path)
        if seed is not None:
            params["seed"] = seed
        manager, name = self._service.manager, self.tree.engine_session(place)
        asked = {"prompt_ids": job.prompts[0], "sampling_params": params}
        if not job.request.stream:
            yield (await manager.generate(name, **asked)).after(0)
            return
        async with aclosing(manager.stream(name, **asked)) as deltas:
            async for delta in deltas:
                yield delta

    async def close(self) -> None:
        """End what still runs."""
        tasks = list(self.tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_SECONDS)
        for name in {turn.engine_session for turn in self.tree.turns}:
            self._service.manager.close_session(name)


class Answering:
    """One call of a program, as its answer is made."""

    def __init__(self, session: Session, request: ChatRequest) -> None:
        self.turns: list[ModelTurn] = []
        """What was recorded; empty before."""

        self._session = session
        self._request = request
        self._answer: ChatAnswer | None = None

    async def whole(self) -> answers.ChatCompletion:
        async with self._session.recording(self._request, self.turns) as answer:
            return await answer.whole()

    async def chunks(self) -> AsyncGenerator[answers.ChatChunk, None]:
        """What ends a sample comes when all are recorded: only then can a client go on from it."""
        ends: list[answers.ChatChunk] = []
        async with (
            self._session.recording(self._request, self.turns) as self._answer,
            aclosing(self._answer.events()) as chunks,
        ):
            async for chunk in chunks:
                if any(choice.finish_reason is None for choice in chunk.choices):
                    yield chunk
                else:
                    ends.append(chunk)
        for chunk in ends:
            yield chunk

    def completion(self) -> answers.ChatCompletion:
        """What has come so far; after the first chunk."""
        assert self._answer is not None
        return self._answer.completion()


class SampledDeltas:
    """The samples of a turn as the chat code reads them, all at once."""

    def __init__(self, job: TurnJob) -> None:
        self._job = job
        self._send, self._receive = anyio.create_memory_object_stream[
            TokenDelta | Exception | None
        ](math.inf)
        self._work: list[asyncio.Task[None]] = []
        self._num_open = len(job.places)

    async def __aenter__(self) -> "SampledDeltas":
        job = self._job
        job.outputs.extend(TokenOutput() for _ in job.places)
        start = job.session.context.run  # what is sampled belongs to the loop of the session
        self._work = [start(asyncio.create_task, self._sample(n)) for n in range(len(job.places))]
        return self

    async def _sample(self, number: int) -> None:
        job = self._job
        try:
            async with aclosing(job.session.sample(job, job.places[number])) as deltas:
                async for delta in deltas:
                    self._send.send_nowait(replace(delta, sample=number))
            self._send.send_nowait(None)
        except (EngineLostError, ValueError, RuntimeError) as error:
            self._send.send_nowait(error)

    async def __aexit__(self, *_: object) -> None:
        for task in self._work:
            task.cancel()
        await asyncio.wait(self._work, timeout=CLOSE_SECONDS)
        self._send.close()
        self._receive.close()

    async def next(self) -> tuple[int, TokenDelta] | None:
        outputs = self._job.outputs
        while self._num_open:
            seconds = self._job.session.request_seconds
            try:
                with anyio.fail_after(seconds):  # not wait_for: see `Run.next`
                    delta = await self._receive.receive()
            except TimeoutError:
                raise too_slow(seconds) from None
            if isinstance(delta, Exception):
                has_begun = any(output.token_ids for output in outputs)
                raise api_error(delta, has_begun=has_begun) from delta
            if delta is not None:
                outputs[delta.sample].add(delta)
                return 0, delta
            self._num_open -= 1
        return None


class SessionService(Service):
    """The server's chat code over a trainer's engines; `budget` is what a row of a batch holds."""

    def __init__(
        self,
        manager: AsyncLLMServerManager,
        tokenizer: Any,
        options: ServerOptions,
        budget: Budget,
        *,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            (), tokenizer, options, fleet=manager.fleet, template_kwargs=template_kwargs
        )
        self.manager = manager
        self.budget = budget

    def run(self, job: Job) -> Deltas:
        assert isinstance(job, TurnJob)
        return SampledDeltas(job)

    def close(self) -> None:
        self.encoder.close()  # the fleet is the trainer's
        self._parser.shutdown(wait=False, cancel_futures=True)

    async def json(self, body: bytes) -> dict[str, Any]:
        """The object in a body; a large one is parsed while others are answered."""

        def parse() -> Any:
            check_size(body, MAX_VALUES)
            try:
                return from_json(body)
            except ValueError:
                message = "the body is not valid JSON, or nested too deeply"
                raise ApiError(400, message, code="invalid_value") from None

        is_small = len(body) <= SMALL_BODY_BYTES
        loop = asyncio.get_running_loop()
        value = parse() if is_small else await loop.run_in_executor(self._parser, parse)
        if not isinstance(value, dict):
            raise ApiError(400, "the body is not a JSON object", code="invalid_value")
        return value


def call_id(path: tuple[int, ...], number: int) -> str:
    """The same in every run of a program, for templates that write ids."""
    digest = hashlib.blake2b(f"{path}:{number}".encode(), digest_size=12)
    return f"call_{digest.hexdigest()}"

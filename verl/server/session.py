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
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from pydantic_core import from_json

from verl.agent_loop.server_manager import AsyncLLMServerManager
from verl.server import answers
from verl.server.chat import ChatAnswer, tool_call
from verl.server.encoding import template_tool
from verl.server.errors import ApiError
from verl.server.forms import check_tool_replies
from verl.server.options import ServerOptions
from verl.server.runs import Deltas, api_error
from verl.server.schemas import MAX_VALUES, SMALL_BODY_BYTES, ChatRequest, check_size
from verl.server.service import Job, Service
from verl.server.tree import Budget, ModelTurn, Place, Tree, derived_seed, too_long
from verl.tools.parsers import ToolParser
from verl.utils.dataset.continuation import CannotContinue
from verl.workers.rollout.base import EngineLostError, TokenDelta, TokenOutput

logger = logging.getLogger(__name__)

MODEL = "policy"
"""The name under which the model is served; any other name is taken too."""

HERMES = "hermes"
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
            completion = await ChatAnswer(self._service, request, job).whole()
            seconds = time.perf_counter() - start
        except BaseException as error:
            for one in places:
                self.tree.release(one)
            self.calls.remove(call)
            if isinstance(error, ApiError) and error.status >= 500:
                self.fault = error.message
            raise
        turns: list[ModelTurn] = []
        for one, output, choice in zip(places, job.outputs, completion.choices, strict=True):
            await self._service.read_calls(request, output, choice)
            for number, made in enumerate(choice.message.tool_calls or ()):
                made.id = call_id(one.path, number)
            turns.append(self.tree.record(one, output, choice.message, seconds))
        call.turns, call.ended = turns, self.num_calls
        self.num_calls += 1
        self.fault = None
        return completion, turns

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

    async def sample(self, job: TurnJob, place: Place) -> TokenOutput:
        """One continuation, with the parameters of the training."""
        params = {
            **self._params,
            "max_tokens": job.max_tokens,
            "stop": (*(self._params.get("stop") or ()), *job.request.stops),
            "stop_token_ids": (
                *(self._params.get("stop_token_ids") or ()),
                *(self._service.stop_token_ids if job.request.offered_tools else ()),
            ),
        }
        seed = derived_seed(self._seed, place.path)
        if seed is not None:
            params["seed"] = seed
        return await self._service.manager.generate(
            self.tree.engine_session(place), prompt_ids=job.prompts[0], sampling_params=params
        )

    async def close(self) -> None:
        """End what still runs."""
        tasks = list(self.tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_SECONDS)
        for name in {turn.engine_session for turn in self.tree.turns}:
            self._service.manager.close_session(name)


class SampledDeltas:
    """The samples of a turn as the chat route reads them: each a single delta."""

    def __init__(self, job: TurnJob) -> None:
        self._job = job
        self._left: list[TokenDelta] = []

    async def __aenter__(self) -> "SampledDeltas":
        job = self._job
        start = job.session.context.run  # what is sampled belongs to the loop of the session
        work = [start(asyncio.create_task, job.session.sample(job, place)) for place in job.places]
        try:
            job.outputs.extend(await asyncio.gather(*work))
        except (EngineLostError, ValueError, RuntimeError) as error:
            raise api_error(error, has_begun=False) from error
        finally:
            for task in work:
                task.cancel()
        self._left = [
            TokenDelta(
                sample=sample,
                token_ids=tuple(output.token_ids),
                log_probs=tuple(output.log_probs),
                policy_versions=tuple(output.policy_versions),
                stop_reason=output.stop_reason,
            )
            for sample, output in enumerate(job.outputs)
        ][::-1]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._left.clear()

    async def next(self) -> tuple[int, TokenDelta] | None:
        return (0, self._left.pop()) if self._left else None


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
        call_format: str = HERMES,
    ) -> None:
        super().__init__(
            (), tokenizer, options, fleet=manager.fleet, template_kwargs=template_kwargs
        )
        self.manager = manager
        self.budget = budget
        self._call_parser: ToolParser | None = None
        if call_format != HERMES:  # which the chat code reads itself
            self._call_parser = ToolParser.get_tool_parser(call_format, tokenizer)
        self.stop_token_ids = (
            () if self._call_parser is None else tuple(self._call_parser.stop_token_ids)
        )

    async def read_calls(
        self, request: ChatRequest, output: TokenOutput, choice: answers.ChatChoice
    ) -> None:
        """Find the calls of a turn in the model's own format; a turn with a call that is no call
        of an offered tool stays text."""
        if self._call_parser is None or not request.offered_tools:
            return
        tools = [template_tool(tool) for tool in request.offered_tools]
        text, calls = await self._call_parser.extract_tool_calls(output.token_ids, tools)
        names = {tool.function.name for tool in request.offered_tools}
        if not calls or not all(call.is_valid and call.name in names for call in calls):
            return
        choice.message.content = text.strip() or None
        choice.message.tool_calls = [tool_call(call) for call in calls]
        if choice.finish_reason == "stop":
            choice.finish_reason = "tool_calls"

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

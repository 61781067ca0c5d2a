"""OpenAI's `/v1/chat/completions`, with tool calls where tools are offered, and `/v1/completions`.

Text is passed on as it comes; calls come whole:

    pieces --reader--> text as soon as it is certain, calls as soon as they are whole

Formats of blocks (hermes, Qwen coder, GLM, ...) are read block by block: a block that is no call of
an offered tool is text like any other. Other formats say what a turn is only at its end: text
before their first mark is passed on as it comes, the rest when the turn has ended; if one of its
calls is none of an offered tool, all of it is text. Either way the client sees what the model
wrote.
"""

import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Sequence
from typing import Any

from starlette.responses import Response

from verl.server.answers import (
    CalledFunction,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprob,
    ChatLogprobs,
    ChatMessage,
    Completion,
    CompletionChoice,
    FinishReason,
    ToolCall,
    ToolCallDelta,
)
from verl.server.encoding import template_tool
from verl.server.events import EventStream
from verl.server.samples import Piece, Sample, StopCutter
from verl.server.schemas import ChatRequest, CompletionRequest
from verl.server.service import Job, Service
from verl.tools.parsers import (
    MAX_CALLS,
    BlockFormat,
    BlockReader,
    BlockToolParser,
    FunctionCall,
    Schemas,
    ToolParser,
    num_doubtful,
    parameters_of,
)
from verl.workers.rollout.base import TokenDelta

CallId = Callable[[int, int], str]
"""The id of a call, by the number of its sample and its own number there."""


async def converse(service: Service, request: ChatRequest) -> Response:
    """Answer a request, in events or as a whole."""
    service.check(request)
    limits = [n for n in (request.max_tokens, request.max_completion_tokens) if n is not None]
    prompt_ids, media = await service.encoder.conversation_with_images(request)
    job = Job(
        kind="chatcmpl",
        request=request,
        prompts=[prompt_ids],
        media=media,
        stop_token_ids=service.call_stop_ids if request.offered_tools else (),
        max_tokens=min(limits, default=None),
    )
    answer = ChatAnswer(service, request, job)
    if request.stream:
        return EventStream(answer.events())
    return Response((await answer.whole()).model_dump_json(), media_type="application/json")


def random_call_id(sample: int, number: int) -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


class ChatAnswer:
    """The choices of one request."""

    def __init__(
        self,
        service: Service,
        request: ChatRequest,
        job: Job,
        *,
        call_id: CallId = random_call_id,
    ) -> None:
        self._service = service
        self._request = request
        self._job = job
        self._turns = [Turn(service, request, index, call_id) for index in range(request.n)]

    async def whole(self) -> ChatCompletion:
        async with self._service.admission.admit(), self._service.run(self._job) as run:
            while (item := await run.next()) is not None:
                await self._turns[item[1].sample].add(item[1])
        return self.completion()

    def completion(self) -> ChatCompletion:
        """What has come so far."""
        return ChatCompletion(
            id=self._job.id,
            created=self._job.created,
            model=self._service.options.model,
            choices=[turn.choice() for turn in self._turns],
            usage=self._job.usage(sum(len(turn.token_ids) for turn in self._turns)),
            prompt_token_ids=self._job.prompts[0] if self._request.return_token_ids else None,
        )

    async def events(self) -> AsyncGenerator[ChatChunk, None]:
        is_first = True
        async with self._service.admission.admit(), self._service.run(self._job) as run:
            while (item := await run.next()) is not None:
                chunk = self._chunk([await self._turns[item[1].sample].add(item[1])])
                if self._request.return_token_ids and is_first:
                    chunk.prompt_token_ids = self._job.prompts[0]
                is_first = False
                yield chunk
        if self._request.reports_usage:
            last = self._chunk([])
            last.usage = self.completion().usage
            yield last

    def _chunk(self, choices: Sequence[ChatChunkChoice]) -> ChatChunk:
        return ChatChunk(
            id=self._job.id,
            created=self._job.created,
            model=self._service.options.model,
            choices=list(choices),
        )


class Turn:
    """One sample of an answer: what the assistant says and calls, and the tokens of both."""

    def __init__(self, service: Service, request: ChatRequest, index: int, call_id: CallId) -> None:
        parser = service.call_parser if request.offered_tools else None
        decode = None if parser is None else parser.decode
        self._sample = Sample(service.encoder, request.stops, decode)
        self._reader = None if parser is None else call_reader(parser, request)
        self._request = request
        self._index = index
        self._call_id = call_id
        self._has_begun = False
        self._texts: list[str] = []
        self._calls: list[ToolCall] = []
        self._log_probs: list[ChatLogprob] = []
        self._finish_reason: FinishReason | None = None
        self.token_ids: list[int] = []

    async def add(self, delta: TokenDelta) -> ChatChunkChoice:
        """Take in what has come; what a client is told of it."""
        piece = self._sample.add(delta)
        parts: Parts = [piece.text] if self._reader is None else await self._reader.add(piece)
        text = "".join(part for part in parts if isinstance(part, str))
        calls = [
            ToolCallDelta(
                index=number,
                id=self._call_id(self._index, number),
                function=CalledFunction(name=call.name, arguments=call.arguments),
            )
            for number, call in enumerate(
                (part for part in parts if isinstance(part, FunctionCall)), len(self._calls)
            )
        ]
        self._texts.append(text)
        self._calls += [ToolCall(id=call.id, function=call.function) for call in calls]
        content = ChatDelta(content=text or None)
        if not self._has_begun:
            content = ChatDelta(role="assistant", content=text)
            self._has_begun = True
        if calls:
            content.tool_calls = calls
        choice = ChatChunkChoice(index=self._index, delta=content)
        self._add_tokens(choice, piece)
        return choice

    def _add_tokens(self, choice: ChatChunkChoice, piece: Piece) -> None:
        self.token_ids += piece.token_ids
        if self._request.logprobs:
            choice.logprobs = self._sample.chat_logprobs(piece)
            self._log_probs += choice.logprobs.content
        if self._request.return_token_ids:
            choice.token_ids = list(piece.token_ids)
        if piece.finish_reason is not None:  # a turn that ended by itself waits for its tools
            is_waiting = piece.finish_reason == "stop" and self._calls
            self._finish_reason = "tool_calls" if is_waiting else piece.finish_reason
            choice.finish_reason = self._finish_reason

    def choice(self) -> ChatChoice:
        """All of it."""
        text = "".join(self._texts)
        message = ChatMessage(content=text)
        if self._calls:
            message.content = text if text.strip() else None
            message.tool_calls = list(self._calls)
        choice = ChatChoice(
            index=self._index, message=message, finish_reason=self._finish_reason or "abort"
        )
        if self._request.logprobs:
            choice.logprobs = ChatLogprobs(content=self._log_probs)
        if self._request.return_token_ids:
            choice.token_ids = self.token_ids
        return choice


DEFAULT_TOKENS = 16
"""OpenAI's default for this route."""


async def complete(service: Service, request: CompletionRequest) -> Response:
    """Answer a request, in events or as a whole."""
    service.check(request)
    job = Job(
        kind="cmpl",
        request=request,
        prompts=await service.encoder.prompts(request),
        max_tokens=request.max_tokens or DEFAULT_TOKENS,
    )
    answer = CompletionAnswer(service, request, job)
    if request.stream:
        return EventStream(answer.events())
    return Response((await answer.whole()).model_dump_json(), media_type="application/json")


class CompletionAnswer:
    """The choices of one request; prompt p and sample s is choice p * n + s."""

    def __init__(self, service: Service, request: CompletionRequest, job: Job) -> None:
        self._service = service
        self._request = request
        self._job = job
        num_choices = len(job.prompts) * request.n
        self._samples = [Sample(service.encoder, request.stops) for _ in range(num_choices)]
        self._has_begun = [False] * num_choices
        self._num_generated = 0

    async def whole(self) -> Completion:
        choices: list[CompletionChoice] = []
        async with self._service.admission.admit(), self._service.run(self._job) as run:
            while (item := await run.next()) is not None:
                choices.append(self._choice(*item))
        choices.sort(key=lambda choice: choice.index)
        answer = self._answer(choices)
        answer.usage = self._job.usage(self._num_generated)
        return answer

    async def events(self) -> AsyncIterator[Completion]:
        async with self._service.admission.admit(), self._service.run(self._job) as run:
            while (item := await run.next()) is not None:
                yield self._answer([self._choice(*item)])
        if self._request.reports_usage:
            last = self._answer([])
            last.usage = self._job.usage(self._num_generated)
            yield last

    def _answer(self, choices: list[CompletionChoice]) -> Completion:
        return Completion(
            id=self._job.id,
            created=self._job.created,
            model=self._service.options.model,
            choices=choices,
        )

    def _choice(self, prompt: int, delta: TokenDelta) -> CompletionChoice:
        index = prompt * self._request.n + delta.sample
        sample = self._samples[index]
        piece = sample.add(delta)
        self._num_generated += len(piece.token_ids)
        choice = CompletionChoice(index=index, text=piece.text, finish_reason=piece.finish_reason)
        if self._request.logprobs is not None:
            choice.logprobs = sample.completion_logprobs(piece)
        if self._request.return_token_ids:
            choice.token_ids = list(piece.token_ids)
            if not self._has_begun[index]:
                choice.prompt_token_ids = self._job.prompts[prompt]
        self._has_begun[index] = True
        return choice


Parts = list[str | FunctionCall]


class CallReader(ABC):
    """Reads one turn."""

    @abstractmethod
    async def add(self, piece: Piece) -> Parts:
        """What has become certain, in the order in which it was written; with the last piece, all
        that is left."""


def call_reader(parser: ToolParser, request: ChatRequest) -> CallReader:
    """The reader of a turn in which the tools of the request are offered."""
    tools = [template_tool(tool) for tool in request.offered_tools]
    block = parser.block_format if isinstance(parser, BlockToolParser) else None
    if block is not None:
        return BlockCallReader(block, parameters_of(tools))
    return TurnCallReader(parser, tools, request.stops)


class BlockCallReader(CallReader):
    """Reads blocks in linear time. Calls of tools that are not among `schemas`, and those after the
    first `MAX_CALLS`, stay text; so does a block that is never closed."""

    def __init__(self, block: BlockFormat, schemas: Schemas) -> None:
        self._block = block
        self._schemas = schemas
        self._blocks = BlockReader(block.opening, block.closing)
        self._num_calls = 0

    async def add(self, piece: Piece) -> Parts:
        parts = self.add_text(piece.text)
        return parts if piece.finish_reason is None else [*parts, self.finish()]

    def add_text(self, text: str) -> Parts:
        parts: Parts = []
        for part in self._blocks.add(text):
            parts += [part] if isinstance(part, str) else self._calls_or_text(part.body)
        return parts

    def finish(self) -> str:
        rest = self._blocks.finish()
        return rest if isinstance(rest, str) else self._block.opening + rest.body

    def _calls_or_text(self, body: str) -> Parts:
        if self._num_calls < MAX_CALLS:
            calls = self._block.read(body, self._schemas)
            if are_calls(calls, self._schemas) and self._num_calls + len(calls) <= MAX_CALLS:
                self._num_calls += len(calls)
                return [*calls]
        return [self._block.opening + body + self._block.closing]


class TurnCallReader(CallReader):
    """Reads the calls of a turn at its end, from its ids."""

    def __init__(
        self, parser: ToolParser, tools: Sequence[dict[str, Any]], stops: tuple[str, ...]
    ) -> None:
        self._parser = parser
        self._tools = tools
        self._stops = stops
        self._ids: list[int] = []
        self._given: list[str] = []
        self._held: list[str] = []
        self._is_certain = bool(parser.openings)  # no mark has come yet

    async def add(self, piece: Piece) -> Parts:
        self._ids += piece.token_ids
        self._held.append(piece.text)
        if piece.finish_reason is None:
            text = self._certain_text()
            self._given.append(text)
            return [text]
        given, held = "".join(self._given), "".join(self._held)
        outside, calls = await self._parser.extract_tool_calls(self._ids, self._tools)
        if not are_calls(calls, parameters_of(self._tools)):
            return [held]
        cutter = StopCutter(self._stops)
        outside = cutter.add(outside) + cutter.finish()
        return [outside.removeprefix(given), *calls]

    def _certain_text(self) -> str:
        """What stands before the first mark, and before what may become one."""
        if not self._is_certain:
            return ""
        text, marks = "".join(self._held), self._parser.openings
        starts = [start for mark in marks if (start := text.find(mark)) >= 0]
        self._is_certain = not starts
        end = min([*starts, *(len(text) - num_doubtful(text, mark) for mark in marks)])
        self._held = [text[end:]]
        return text[:end]


def are_calls(calls: Sequence[FunctionCall], offered: Collection[str]) -> bool:
    """Whether all of them are calls of offered tools, with arguments that can be read."""
    return all(call.name in offered and call.is_valid for call in calls)

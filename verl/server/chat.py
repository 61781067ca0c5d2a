"""`/v1/chat/completions`: a conversation, with tool calls where tools are offered.

Tool calls are parsed from the model's text in the form of Hermes and Qwen models:

    <tool_call>
    {"name": "weather", "arguments": {"city": "Bern"}}
    </tool_call>

Text outside is passed on as it comes; a block is held until it is whole. A block that is not such
an object, or calls a tool that was not offered, is text like any other: the client sees what the
model wrote.
"""

import uuid
from collections.abc import AsyncIterator, Collection, Sequence

from starlette.responses import Response

from verl.server.answers import (
    CalledFunction,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatMessage,
    FinishReason,
    ToolCall,
    ToolCallDelta,
)
from verl.server.events import EventStream
from verl.server.samples import Piece, Sample
from verl.server.schemas import ChatRequest
from verl.server.service import Job, Service
from verl.tools.parsers import CLOSE, MAX_CALLS, OPEN, BlockReader, FunctionCall, json_call
from verl.workers.rollout.base import TokenDelta


class ToolCallReader:
    """Finds the calls of the tools `names` in a text that comes in pieces, in linear time.

    Calls of other tools, and those after the first `MAX_CALLS`, stay text.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)
        self._blocks = BlockReader(OPEN, CLOSE)
        self._num_calls = 0

    def add(self, text: str) -> list[str | FunctionCall]:
        """What has become certain: text and calls in the order in which they were written."""
        return [
            part if isinstance(part, str) else self._call_or_text(part.body)
            for part in self._blocks.add(text)
        ]

    def finish(self) -> str:
        """A block that was never closed is text."""
        rest = self._blocks.finish()
        return rest if isinstance(rest, str) else OPEN + rest.body

    def _call_or_text(self, body: str) -> str | FunctionCall:
        call = json_call(body) if self._num_calls < MAX_CALLS else None
        if call is None or call.name not in self._names or not call.is_valid:
            return OPEN + body + CLOSE
        self._num_calls += 1
        return call


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
        max_tokens=min(limits, default=None),
    )
    answer = ChatAnswer(service, request, job)
    if request.stream:
        return EventStream(answer.events())
    return Response((await answer.whole()).model_dump_json(), media_type="application/json")


class ChatAnswer:
    """The choices of one request."""

    def __init__(self, service: Service, request: ChatRequest, job: Job) -> None:
        self._service = service
        self._request = request
        self._job = job
        self._samples = [Sample(service.encoder, request.stops) for _ in range(request.n)]
        names = [tool.function.name for tool in request.offered_tools]
        self._turns = [Turn(names) for _ in range(request.n)]
        self._num_generated = 0

    async def whole(self) -> ChatCompletion:
        choices: list[ChatChoice] = []
        async with self._service.admission.admit(), self._service.run(self._job) as run:
            while (item := await run.next()) is not None:
                choices.append(self._choice(item[1]))
        choices.sort(key=lambda choice: choice.index)
        return ChatCompletion(
            id=self._job.id,
            created=self._job.created,
            model=self._service.options.model,
            choices=choices,
            usage=self._job.usage(self._num_generated),
            prompt_token_ids=self._job.prompts[0] if self._request.return_token_ids else None,
        )

    async def events(self) -> AsyncIterator[ChatChunk]:
        has_begun: set[int] = set()
        async with self._service.admission.admit(), self._service.run(self._job) as run:
            while (item := await run.next()) is not None:
                delta = item[1]
                chunk = self._chunk(
                    [self._chunk_choice(delta, is_first=delta.sample not in has_begun)]
                )
                if self._request.return_token_ids and not has_begun:
                    chunk.prompt_token_ids = self._job.prompts[0]
                has_begun.add(delta.sample)
                yield chunk
        if self._request.reports_usage:
            last = self._chunk([])
            last.usage = self._job.usage(self._num_generated)
            yield last

    def _choice(self, delta: TokenDelta) -> ChatChoice:
        piece, found = self._read(delta)
        turn = self._turns[delta.sample]
        text = "".join(part for part in found if isinstance(part, str))
        calls = [part for part in found if isinstance(part, FunctionCall)]
        message = ChatMessage(content=text)
        if calls:
            message.content = text if text.strip() else None
            message.tool_calls = [tool_call(call) for call in calls]
        choice = ChatChoice(
            index=delta.sample, message=message, finish_reason=turn.finish_reason(piece) or "abort"
        )
        self._add_tokens(choice, delta.sample, piece)
        return choice

    def _chunk_choice(self, delta: TokenDelta, *, is_first: bool) -> ChatChunkChoice:
        turn = self._turns[delta.sample]
        num_calls = turn.num_calls
        piece, found = self._read(delta)
        text = "".join(part for part in found if isinstance(part, str))
        calls = [part for part in found if isinstance(part, FunctionCall)]
        content = ChatDelta(content=text or None)
        if is_first:
            content = ChatDelta(role="assistant", content=text)
        if calls:
            content.tool_calls = [
                ToolCallDelta(index=num_calls + index, **tool_call(call).model_dump())
                for index, call in enumerate(calls)
            ]
        choice = ChatChunkChoice(
            index=delta.sample, delta=content, finish_reason=turn.finish_reason(piece)
        )
        self._add_tokens(choice, delta.sample, piece)
        return choice

    def _read(self, delta: TokenDelta) -> tuple[Piece, list[str | FunctionCall]]:
        piece = self._samples[delta.sample].add(delta)
        self._num_generated += len(piece.token_ids)
        return piece, self._turns[delta.sample].read(piece)

    def _add_tokens(self, choice: ChatChoice | ChatChunkChoice, index: int, piece: Piece) -> None:
        if self._request.logprobs:
            choice.logprobs = self._samples[index].chat_logprobs(piece)
        if self._request.return_token_ids:
            choice.token_ids = list(piece.token_ids)

    def _chunk(self, choices: Sequence[ChatChunkChoice]) -> ChatChunk:
        return ChatChunk(
            id=self._job.id,
            created=self._job.created,
            model=self._service.options.model,
            choices=list(choices),
        )


class Turn:
    """What the assistant says and calls in one sample."""

    def __init__(self, tool_names: Collection[str]) -> None:
        self._reader = ToolCallReader(tool_names) if tool_names else None
        self.num_calls = 0

    def read(self, piece: Piece) -> list[str | FunctionCall]:
        if self._reader is None:
            return [piece.text]
        found = self._reader.add(piece.text)
        if piece.finish_reason is not None:
            found.append(self._reader.finish())
        self.num_calls += sum(isinstance(part, FunctionCall) for part in found)
        return found

    def finish_reason(self, piece: Piece) -> FinishReason | None:
        """A turn that ended by itself and called a tool waits for the tool."""
        return (
            "tool_calls"
            if piece.finish_reason == "stop" and self.num_calls
            else piece.finish_reason
        )


def tool_call(call: FunctionCall) -> ToolCall:
    function = CalledFunction(name=call.name, arguments=call.arguments)
    return ToolCall(id=f"call_{uuid.uuid4().hex[:24]}", function=function)


def chunks_of(completion: ChatCompletion, *, reports_usage: bool) -> list[ChatChunk]:
    """An answer that is whole already, as the events of a stream."""
    deltas: list[ChatChunkChoice] = []
    for choice in completion.choices:
        message, index = choice.message, choice.index
        calls = [
            ToolCallDelta(index=number, **call.model_dump())
            for number, call in enumerate(message.tool_calls or ())
        ]
        opening = ChatDelta(role="assistant", content=message.content or "")
        deltas.append(ChatChunkChoice(index=index, delta=opening, logprobs=choice.logprobs))
        deltas[-1].token_ids = choice.token_ids
        deltas += [
            ChatChunkChoice(index=index, delta=ChatDelta(tool_calls=[call])) for call in calls
        ]
        end = ChatChunkChoice(index=index, delta=ChatDelta(), finish_reason=choice.finish_reason)
        deltas.append(end)
    head = {"id": completion.id, "created": completion.created, "model": completion.model}
    chunks = [ChatChunk(**head, choices=[delta]) for delta in deltas]
    chunks[0].prompt_token_ids = completion.prompt_token_ids
    if reports_usage:
        chunks.append(ChatChunk(**head, choices=[], usage=completion.usage))
    return chunks

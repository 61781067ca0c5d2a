"""`/v1/chat/completions`: a conversation, with tool calls where tools are offered.

Text is passed on as it comes; calls come whole (`tool_calls`).
"""

import uuid
from collections.abc import AsyncGenerator, Callable, Sequence

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
    FinishReason,
    ToolCall,
    ToolCallDelta,
)
from verl.server.events import EventStream
from verl.server.samples import Piece, Sample
from verl.server.schemas import ChatRequest
from verl.server.service import Job, Service
from verl.server.tool_calls import Parts, call_reader
from verl.tools.parsers import FunctionCall
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

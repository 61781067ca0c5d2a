"""`/v1/completions`: prompts go on."""

from collections.abc import AsyncIterator

from starlette.responses import Response

from verl.server.answers import Completion, CompletionChoice
from verl.server.events import EventStream
from verl.server.samples import Sample
from verl.server.schemas import CompletionRequest
from verl.server.service import Job, Service
from verl.workers.rollout.base import TokenDelta

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

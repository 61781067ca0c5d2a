"""Generation with Hugging Face `generate` on the trainer's own module; `rollout.name=hf`.

For debugging: nothing of the built-in engine runs but its sampler, so where the two agree, slots,
kernels and scheduling are not at fault. `generate` is left with the forward passes and its cache.
A logits processor draws the token of each row and hands `generate` scores in which only that one is
possible; a row's tokens thus depend on its seed and logits alone, and equal seeds give the tokens
of the built-in engine, up to rounding.

The module trains packed rows with our attention. While it generates it has transformers' own
attention, evaluation mode and plain generation options; afterwards everything is as before. Weights
are neither copied nor moved.
"""

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

from verl.workers.rollout.base import GenerationRequest, OnEnd, Rollout, TokenOutput
from verl.workers.rollout.native.rows import RowSettings
from verl.workers.rollout.native.sampler import Needs, next_tokens
from verl.workers.rollout.native.sequence import (
    EngineLimits,
    RunningRequest,
    Sample,
    build_groups,
    tokens_until_stop,
)
from verl.workers.rollout.sequences import pad
from verl.workers.rollout.stepping import EngineThread, Submission

PLAIN_ATTENTION = "eager"
"""The one that every architecture has, soft caps and sinks included."""

Decode = Callable[[list[int]], str]


class HFRollout(Rollout):
    """Continues prompts with `module`; `version` tells how many updates its weights have seen.

    It runs on a thread of its own. Requests that wait at the same time run in one batch of at most
    `max_num_seqs` rows; later ones wait for the next batch.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        *,
        max_num_seqs: int,
        max_prompt_tokens: int,
        max_response_tokens: int,
        eos_token_ids: Sequence[int],
        pad_token_id: int,
        version: Callable[[], int] = lambda: 0,
        decode_text: Decode | None = None,
        seed: int = 0,
    ) -> None:
        self.module = module
        self.limits = EngineLimits(
            max_num_seqs=max_num_seqs,
            max_prompt_tokens=max_prompt_tokens,
            max_response_tokens=max_response_tokens,
        )
        self.eos_token_ids = frozenset(eos_token_ids)
        self.pad_token_id = pad_token_id
        self._version = version
        self._decode_text = decode_text
        self._fresh_seeds = itertools.count(seed)
        self._waiting: dict[RunningRequest, Submission] = {}
        self._aborted: set[str] = set()  # names of requests that must get no more tokens
        device = next(module.parameters()).device
        self._thread = EngineThread(self, HFRollout._run_waiting, name="hf rollout", device=device)

    @property
    def policy_version(self) -> int:
        return self._version()

    def submit(
        self, request: GenerationRequest, on_end: OnEnd | None = None
    ) -> Future[list[TokenOutput]]:
        return self._thread.submit(request, on_end, HFRollout._add, HFRollout._cancel)

    def together(self) -> AbstractContextManager[None]:
        return self._thread.together()

    def abort(self, request_id: str) -> None:
        """A row that runs is told before its next token; its batch goes on without it."""
        self._aborted.add(request_id)
        self._thread.post(HFRollout._abort, request_id)

    def close_session(self, session_id: str) -> None:
        """Does nothing: no state is kept between requests."""

    def sleep(self) -> None:
        """Does nothing: no memory is held between calls."""

    def wake_up(self) -> None:
        """Does nothing: `sleep` freed nothing."""

    # ---- from requests to batches ----------------------------------------------------------------

    def _add(self, submission: Submission) -> None:
        if submission.future.cancelled():
            return
        request = submission.request
        seed = request.params.seed
        if request.media:
            text = f"request {request.request_id} has images, which rollout.name=hf does not take"
            submission.fail(ValueError(f"{text}; use native"))
            return
        try:
            running = build_groups(
                request,
                self.limits,
                num_slots=self.limits.max_num_seqs,
                max_shared=self.limits.max_prompt_tokens,
                seed=next(self._fresh_seeds) if seed is None else seed,
                vocabulary=int(self.module.config.get_text_config().vocab_size),
                eos_token_ids=self.eos_token_ids,
                can_decode_text=self._decode_text is not None,
            )
        except ValueError as refusal:
            submission.fail(refusal)
        else:
            self._waiting[running] = submission

    def _cancel(self, future: Future[list[TokenOutput]]) -> None:
        self._waiting = {r: s for r, s in self._waiting.items() if s.future is not future}

    def _abort(self, request_id: str) -> None:
        self._aborted.discard(request_id)
        for running in self._waiting:
            if running.request.request_id == request_id:
                for sample in samples_of([running]):
                    sample.output.stop_reason = "abort"

    def _run_waiting(self) -> bool:
        """On the thread: all requests get their result, or the error."""
        waiting, self._waiting = self._waiting, {}
        try:
            self._run(samples_of(waiting))
        except BaseException as error:
            for submission in waiting.values():
                submission.fail(error)
            if not isinstance(error, Exception):
                raise
            return False
        for running, submission in waiting.items():
            for sample in samples_of([running]):
                submission.end(sample.index, sample.output)
            submission.resolve()
        return False

    def _run(self, samples: Sequence[Sample]) -> None:
        samples = [sample for sample in samples if not sample.is_finished]
        if not samples:
            return
        size = self.limits.max_num_seqs
        with as_plain_model(self.module):
            for start in range(0, len(samples), size):
                self._run_rows(samples[start : start + size])

    def _run_rows(self, samples: Sequence[Sample]) -> None:
        device = next(self.module.parameters()).device
        rows = DrawnRows(
            samples, self.module, self._version(), self._decode_text, aborted=self._aborted
        )
        prompts = [sample.group.prompt_ids for sample in samples]
        ids, mask = pad(prompts, max(map(len, prompts)), self.pad_token_id, on_left=True)
        options = GenerationConfig(
            do_sample=False,
            use_cache=True,
            max_new_tokens=max(sample.group.token_limit for sample in samples),
            pad_token_id=self.pad_token_id,
        )
        with torch.no_grad():
            self.module.generate(  # pyright: ignore[reportCallIssue]
                ids.to(device),
                attention_mask=mask.to(device),
                generation_config=options,
                logits_processor=LogitsProcessorList([Draws(rows)]),
                stopping_criteria=StoppingCriteriaList([Ends(rows)]),
            )
        assert all(sample.is_finished for sample in samples)


def samples_of(requests: Iterable[RunningRequest]) -> list[Sample]:
    return [sample for one in requests for group in one.groups for sample in group.samples]


class DrawnRows:
    """The rows of one call of `generate`: which token each gets next and when it is done."""

    def __init__(
        self,
        samples: Sequence[Sample],
        module: PreTrainedModel,
        version: int,
        decode_text: Decode | None,
        *,
        aborted: Collection[str] = (),
    ) -> None:
        """`aborted` are names of requests; it may grow meanwhile."""
        self.samples = samples
        self._aborted = aborted
        self._version = version
        self._decode_text = decode_text
        params = [sample.group.request.params for sample in samples]
        self.device = next(module.parameters()).device
        self._needs = Needs.of(params)
        self._settings = RowSettings.of(params, [sample.seed for sample in samples], self.device)

    def draw(self, logits: Tensor) -> Tensor:
        """The next token of each row of `logits` (B, V); rows that are done get one in vain."""
        indices = torch.tensor([s.next_index for s in self.samples], device=self.device)
        seen = self._seen(logits) if self._needs.penalty else None
        tokens, log_probs = next_tokens(logits, self._settings, self._needs, indices, seen)
        drawn = zip(self.samples, tokens.tolist(), log_probs.tolist(), strict=True)
        for sample, token, log_prob in drawn:
            if sample.group.request.request_id in self._aborted and not sample.is_finished:
                sample.output.stop_reason = "abort"
            if not sample.is_finished:
                self._append(sample, token, log_prob)
        return tokens

    def are_done(self) -> Tensor:
        """(B,) True for rows that have come to their end."""
        return torch.tensor([sample.is_finished for sample in self.samples], device=self.device)

    def _seen(self, logits: Tensor) -> Tensor:
        seen = torch.zeros_like(logits, dtype=torch.bool)
        for row, sample in zip(seen, self.samples, strict=True):
            row[torch.tensor(sample.token_ids, device=self.device)] = True
        return seen

    def _append(self, sample: Sample, token: int, log_prob: float) -> None:
        if not math.isfinite(log_prob):
            raise FloatingPointError(
                f"request {sample.group.request.request_id} got log-probability {log_prob} from "
                f"version {self._version} of the weights; they have diverged: go back to a "
                "checkpoint and lower the learning rate"
            )
        sample.output.token_ids.append(token)
        sample.output.log_probs.append(log_prob)
        sample.output.policy_versions.append(self._version)
        sample.output.stop_reason = self._stop_reason(sample, token)

    def _stop_reason(self, sample: Sample, token: int) -> str:
        stop = sample.group.request.params.stop
        if token in sample.group.stop_token_ids:
            return "stop"
        if stop and self._decode_text is not None:
            ids = sample.group.sampled_ids + sample.output.token_ids
            if tokens_until_stop(ids, 1, stop, self._decode_text) is not None:
                return "stop"
        return "length" if sample.num_tokens >= sample.group.token_limit else ""


class Draws(LogitsProcessor):
    """Leaves `generate`, which takes the likeliest token, no choice but the one that was drawn."""

    def __init__(self, rows: DrawnRows) -> None:
        self._rows = rows

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        tokens = self._rows.draw(scores)
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens[:, None], 0.0)


class Ends(StoppingCriteria):
    """Lets a row end where its sample does."""

    def __init__(self, rows: DrawnRows) -> None:
        self._rows = rows

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: object) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._rows.are_done()


@contextmanager
def as_plain_model(module: PreTrainedModel) -> Iterator[None]:
    """The module with ordinary attention, in evaluation mode, without options of its own for
    generation (a model's repetition penalty would join the request's), while the context lasts."""
    attention = module.config._attn_implementation or PLAIN_ATTENTION
    options = module.generation_config
    in_training = [part for part in module.modules() if part.training]
    module.set_attn_implementation(PLAIN_ATTENTION)
    module.generation_config = GenerationConfig()
    module.eval()
    try:
        yield
    finally:
        module.set_attn_implementation(attention)
        module.generation_config = options
        for part in in_training:
            part.training = True

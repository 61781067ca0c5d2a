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

import asyncio
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

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

from verl.workers.rollout.base import GenerationRequest, Rollout, TokenOutput
from verl.workers.rollout.native.requests import EngineLimits, build_groups
from verl.workers.rollout.native.sampler import Needs, RowSettings, next_tokens
from verl.workers.rollout.native.sequence import Group, Sample
from verl.workers.rollout.native.stop_text import tokens_until_stop
from verl.workers.rollout.sequences import pad

PLAIN_ATTENTION = "eager"
"""The one that every architecture has, soft caps and sinks included."""

Decode = Callable[[list[int]], str]


class HFRollout(Rollout):
    """Continues prompts with `module`; `version` tells how many updates its weights have seen.

    Everything runs on the caller's thread. Callers of `generate` that wait at the same time run in
    one batch of at most `max_num_seqs` rows; who comes later waits for the next.
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
        self._waiting: list[tuple[list[Group], asyncio.Future[None]]] = []

    @property
    def policy_version(self) -> int:
        return self._version()

    def generate_batch(self, requests: Sequence[GenerationRequest]) -> list[list[TokenOutput]]:
        groups = [self._groups(request) for request in requests]
        self._run(samples_of(itertools.chain.from_iterable(groups)))
        return [[sample.output for sample in samples_of(own)] for own in groups]

    async def generate(self, request: GenerationRequest) -> list[TokenOutput]:
        groups = self._groups(request)
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((groups, turn))
        try:
            await asyncio.sleep(0)  # who asks at the same time comes into the same batch
            if (groups, turn) in self._waiting:
                self._run_waiting()
            await turn
        finally:
            if (groups, turn) in self._waiting:  # the caller no longer waits
                self._waiting.remove((groups, turn))
        return [sample.output for sample in samples_of(groups)]

    def abort(self, request_id: str) -> None:
        """Of those that have not begun: one that runs is done before anybody can abort it."""
        for groups, _ in self._waiting:
            for sample in samples_of(groups):
                if sample.group.request.request_id == request_id:
                    sample.output.stop_reason = "abort"

    def close_session(self, session_id: str) -> None:
        """Nothing is kept from one request to the next."""

    def sleep(self) -> None:
        """Nothing is kept between calls."""

    def wake_up(self) -> None:
        """Nothing was given back."""

    # ---- from requests to batches ----------------------------------------------------------------

    def _groups(self, request: GenerationRequest) -> list[Group]:
        seed = request.params.seed
        return build_groups(
            request,
            self.limits,
            num_slots=self.limits.max_num_seqs,
            max_shared=self.limits.max_prompt_tokens,
            seed=next(self._fresh_seeds) if seed is None else seed,
            vocabulary=int(self.module.config.get_text_config().vocab_size),
            eos_token_ids=self.eos_token_ids,
            can_decode_text=self._decode_text is not None,
        )

    def _run_waiting(self) -> None:
        """Everybody who waits gets the result, or the error."""
        waiting, self._waiting = self._waiting, []
        turns = [turn for _, turn in waiting if not turn.done()]
        try:
            self._run(samples_of(group for groups, _ in waiting for group in groups))
        except BaseException as error:
            for turn in turns:
                turn.set_exception(error)
            if not isinstance(error, Exception):
                raise
            return
        for turn in turns:
            turn.set_result(None)

    def _run(self, samples: Sequence[Sample]) -> None:
        samples = [sample for sample in samples if not sample.is_finished]
        size = self.limits.max_num_seqs
        with as_plain_model(self.module):
            for start in range(0, len(samples), size):
                self._run_rows(samples[start : start + size])

    def _run_rows(self, samples: Sequence[Sample]) -> None:
        device = next(self.module.parameters()).device
        rows = DrawnRows(samples, self.module, self._version(), self._decode_text)
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


def samples_of(groups: Iterable[Group]) -> list[Sample]:
    return [sample for group in groups for sample in group.samples]


class DrawnRows:
    """The rows of one call of `generate`: which token each gets next and when it is done."""

    def __init__(
        self,
        samples: Sequence[Sample],
        module: PreTrainedModel,
        version: int,
        decode_text: Decode | None,
    ) -> None:
        self.samples = samples
        self._version = version
        self._decode_text = decode_text
        params = [sample.group.request.params for sample in samples]
        self.device = next(module.parameters()).device
        self._needs = Needs.of(params)
        self._settings = RowSettings.of(params, [sample.seed for sample in samples], self.device)

    def draw(self, logits: Tensor) -> Tensor:
        """The next token of each row of `logits` (B, V); rows that are done get one in vain."""
        indices = torch.tensor([s.num_tokens for s in self.samples], device=self.device)
        seen = self._seen(logits) if self._needs.penalty else None
        tokens, log_probs = next_tokens(logits, self._settings, self._needs, indices, seen)
        news = zip(self.samples, tokens.tolist(), log_probs.tolist(), strict=True)
        for sample, token, log_prob in news:
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
            ids = sample.output.token_ids
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

"""A request inside the engine: its groups, their samples, and when a sample ends. No tensors.

A prompt with its continuations is a `Group`, which is admitted as a whole. `build_groups` turns a
request into groups and refuses what cannot run (`EngineLimits`) before anything is queued. A
response ends with a stop token, at its longest, or with the token that completes a stop text: the
only place where the engine looks at text.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.utils.media import Media, identity_ids
from verl.utils.scramble import GOLDEN, keyed_seed, scramble
from verl.workers.rollout.base import GenerationRequest, TokenDelta, TokenOutput

if TYPE_CHECKING:  # engines in environments of their own read this file without transformers
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class IdleHolder:
    """Holds memory of the cache for a session that waits for its next turn."""


@dataclass(kw_only=True, eq=False)
class KeptMemory:
    """Memory of the cache in which a sequence has ended, for the next turn of its session."""

    num_shared: int
    """Tokens in the part that other sequences may hold as well."""

    shared: IdleHolder = field(default_factory=IdleHolder)
    own: IdleHolder = field(default_factory=IdleHolder)
    moved_from: tuple[int, int] | None = None
    """Prompt slot and response slot from which the next turn has to copy what is known."""


@dataclass(frozen=True)
class KnownTokens:
    """Tokens whose keys and values need not be computed, and where these are."""

    token_ids: list[int] = field(default_factory=list)
    """As sequences are compared (`Sample.identity`)."""

    layers: "list[tuple[Tensor, Tensor]]" = field(default_factory=list)
    """Copies of them per layer, (tokens, KV heads, head dim) each; none where they have stayed in
    the cache."""

    kept: KeptMemory | None = None
    routes: "Tensor | None" = None
    """Their experts, (tokens, layers, k), where these are recorded."""

    @property
    def num_bytes(self) -> int:
        """What the copies take."""
        return sum(x.nbytes for pair in self.layers for x in pair)

    def prefix(self, num_tokens: int) -> "KnownTokens":
        layers = [(keys[:num_tokens], values[:num_tokens]) for keys, values in self.layers]
        routes = None if self.routes is None else self.routes[:num_tokens]
        kept = self.kept if num_tokens else None
        return KnownTokens(self.token_ids[:num_tokens], layers, kept, routes)


@dataclass(kw_only=True, eq=False)
class Sample:
    """One continuation. While it runs it owns a response slot, which is also its row in a step."""

    group: "Group"
    index: int
    """Among the samples of the request."""

    seed: int
    session_id: str | None = None
    slot: int = -1
    output: TokenOutput = field(default_factory=TokenOutput)
    routes: "list[Tensor]" = field(default_factory=list)
    """Experts of its tokens so far, in pieces of (tokens, layers, k), where these are recorded."""

    @property
    def num_tokens(self) -> int:
        return len(self.output.token_ids)

    @property
    def next_index(self) -> int:
        """Index in the response of the token that is drawn next."""
        return self.group.request.num_sampled + self.num_tokens

    @property
    def num_own(self) -> int:
        """Tokens in the sample's own slot: its response and what of the prompt is not shared."""
        return len(self.group.prompt_ids) - self.group.num_shared + self.num_tokens

    @property
    def token_ids(self) -> list[int]:
        """Prompt and response."""
        return self.group.prompt_ids + self.output.token_ids

    @property
    def identity(self) -> list[int]:
        """Prompt and response as sequences are compared: images by their content."""
        return identity_ids(self.token_ids, self.group.media)

    @property
    def is_finished(self) -> bool:
        return bool(self.output.stop_reason)


@dataclass(kw_only=True, eq=False)
class Group:
    """A prompt with its continuations. While any of them runs it owns a prompt slot.

    A request for more samples than the engine has slots becomes several groups.
    """

    owner: "RunningRequest"
    prompt_ids: list[int]

    num_shared: int
    """Tokens of the prompt that its slot holds for all samples; what does not fit goes to the front
    of every sample's own slot."""

    token_limit: int
    """Most tokens a sample may have."""

    stop_token_ids: tuple[int, ...]
    """Tokens that end a sample, the model's own included."""

    samples: list[Sample] = field(default_factory=list)
    slot: int = -1
    arrival: int = -1
    """Groups are numbered in the order in which they were queued first; a turn of a conversation
    has the number of its first."""

    num_ended: int = 0
    """Samples that have left for good."""

    known: KnownTokens = field(default_factory=KnownTokens)
    """What an earlier turn has left of the prompt; looked up when the group is admitted."""

    @property
    def session_id(self) -> str | None:
        """The session that the group continues: of a prompt with one sample, if it begins now."""
        if len(self.samples) > 1 or self.has_tokens:
            return None
        return self.samples[0].session_id

    @property
    def request(self) -> GenerationRequest:
        return self.owner.request

    @property
    def media(self) -> tuple[Media, ...]:
        return self.owner.request.media

    @cached_property
    def identity(self) -> list[int]:
        """The prompt as sequences are compared: images by their content."""
        return identity_ids(self.prompt_ids, self.media)

    @property
    def sampled_ids(self) -> list[int]:
        """The beginning of the response, where the prompt ends with it."""
        return self.prompt_ids[len(self.prompt_ids) - self.request.num_sampled :]

    @property
    def unfinished(self) -> list[Sample]:
        return [sample for sample in self.samples if not sample.is_finished]

    @property
    def is_finished(self) -> bool:
        return self.num_ended == len(self.samples)

    @property
    def has_tokens(self) -> bool:
        """Whether the group has run before and lost its keys and values."""
        return any(sample.num_tokens for sample in self.unfinished)

    @property
    def num_prefill_tokens(self) -> int:
        """What a prefill computes: the prompt but what is known of it, or all of every sample that
        ran before."""
        if self.has_tokens:
            return sum(len(self.prompt_ids) + sample.num_tokens for sample in self.unfinished)
        return len(self.prompt_ids) - len(self.known.token_ids)


class LostRequestError(RuntimeError):
    """The engine failed while a request ran; the cause is attached. The engine itself can go on."""


@dataclass(kw_only=True, eq=False)
class RunningRequest:
    """A request inside the engine."""

    request: GenerationRequest
    groups: list[Group] = field(default_factory=list)
    error: BaseException | None = None
    """What made the engine drop the request."""

    arrived_at: float = field(default_factory=time.monotonic)

    @property
    def is_finished(self) -> bool:
        return all(group.is_finished for group in self.groups)

    @property
    def outputs(self) -> list[TokenOutput]:
        """One per sample; raises if the engine has dropped the request."""
        if self.error is not None:
            raise self.loss(self.error) from self.error
        return [sample.output for group in self.groups for sample in group.samples]

    def loss(self, error: BaseException) -> LostRequestError:
        """What to tell the caller of a request that was dropped because of `error`."""
        return LostRequestError(
            f"request {self.request.request_id} was lost: a step of the engine failed "
            f"({error!r}); the engine has dropped all requests and can go on"
        )


class NewTokens:
    """What the samples of a request have got since it was last asked for."""

    def __init__(self, running: RunningRequest) -> None:
        self._running = running
        self._num_taken = [0] * running.request.num_samples  # -1 once the end has been told

    @property
    def is_finished(self) -> bool:
        return all(num_taken < 0 for num_taken in self._num_taken)

    def take(self) -> Iterator[TokenDelta]:
        for sample, output in enumerate(self._running.outputs):
            taken = self._num_taken[sample]
            if taken < 0 or (taken == len(output.token_ids) and not output.stop_reason):
                continue
            self._num_taken[sample] = -1 if output.stop_reason else len(output.token_ids)
            yield output.after(taken, sample)


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """How much the engine takes on at once."""

    max_num_seqs: int = 256
    """Most sequences that run at the same time, as far as `max_cache_bytes` has room for them."""

    max_prompt_tokens: int = 512
    """Length of a prompt slot. A longer prompt may run; it shortens the longest response."""

    max_response_tokens: int = 512
    """Length of a response slot."""

    max_prefill_tokens: int = 8192
    """Most prompt tokens in one forward pass; a longer prompt runs alone."""

    max_cache_bytes: int = 4 << 30
    """Memory for keys and values of running sequences. Where it is too small for all at full
    length, kernels share it in pages; plain torch runs fewer at once."""

    max_session_bytes: int = 1 << 30
    """Memory for keys and values of finished turns of conversations. Plain torch copies them there;
    with kernels it is slots or pages beside those of running sequences, in which turns end and go
    on."""

    max_stop_tokens: int = 32
    """Most token ids that end a response, the model's own included."""

    tokens_per_step: int = 4
    """Tokens that every sequence gets per engine step, before the host reads them. More save work
    on the host; a sequence that ends in between computes in vain for the rest of the step."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            smallest = 0 if name in ("max_session_bytes", "max_stop_tokens") else 1
            if value < smallest:
                raise ValueError(f"{name} is {value}; it must be {smallest} or more")

    def num_slots(self, bytes_per_sequence: int) -> int:
        """How many sequences run at most, given what one of them takes."""
        num_slots = min(self.max_num_seqs, self.max_cache_bytes // bytes_per_sequence)
        if num_slots == 0:
            raise ValueError(
                f"keys and values of one sequence of {self.max_prompt_tokens} + "
                f"{self.max_response_tokens} tokens take {bytes_per_sequence:,} bytes, but "
                f"max_cache_bytes is {self.max_cache_bytes:,}; lower rollout.prompt_length or "
                "rollout.response_length, or raise the memory for the cache "
                "(rollout.gpu_memory_utilization)"
            )
        return num_slots


def build_groups(
    request: GenerationRequest,
    limits: EngineLimits,
    *,
    num_slots: int,
    max_shared: int,
    seed: int,
    vocabulary: int,
    eos_token_ids: Iterable[int],
    can_decode_text: bool,
) -> RunningRequest:
    """A request with its groups, each small enough for `num_slots`; not yet queued.

    `max_shared` is the length of a prompt slot.
    """
    refuse_what_cannot_run(request, limits, vocabulary, can_decode_text)
    params, prompt_ids = request.params, list(map(int, request.prompt_ids))
    stop_token_ids = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
    if len(stop_token_ids) > limits.max_stop_tokens:
        raise ValueError(
            f"request {request.request_id} ends at any of {len(stop_token_ids)} tokens; the engine "
            f"looks for {limits.max_stop_tokens} at most: use fewer stop_token_ids"
        )
    # A response that was cut and continued ends where it would have ended.
    num_before = len(prompt_ids) - request.num_sampled
    max_new_tokens = limits.max_response_tokens - max(0, num_before - limits.max_prompt_tokens)
    max_new_tokens -= request.num_sampled
    if max_new_tokens < 1:
        raise ValueError(
            f"request {request.request_id} continues a response of {request.num_sampled} tokens, "
            f"which has no room for more (rollout.response_length is {limits.max_response_tokens})"
        )
    seeds = seeds_of_samples(request, seed)
    session_ids = request.session_ids or (None,) * request.num_samples
    running = RunningRequest(request=request)
    for start in range(0, request.num_samples, num_slots):
        group = Group(
            owner=running,
            prompt_ids=prompt_ids,
            num_shared=min(len(prompt_ids), max_shared),
            token_limit=min(params.max_tokens, max_new_tokens),
            stop_token_ids=tuple(sorted(stop_token_ids)),
        )
        for index in range(start, min(start + num_slots, request.num_samples)):
            group.samples.append(
                Sample(group=group, index=index, seed=seeds[index], session_id=session_ids[index])
            )
        running.groups.append(group)
    return running


def seeds_of_samples(request: GenerationRequest, seed: int) -> list[int]:
    """Seeds of the samples: derived from the request's seed, unless each sample has its own."""
    if request.seeds is not None:
        return sample_seeds(request.seeds, [0] * request.num_samples)
    return sample_seeds([seed], range(request.num_samples))


def seeds_of_continuations(request: GenerationRequest, seed: int) -> list[int]:
    """Seeds for an engine that counts drawn tokens from the start of each request: a request that
    continues another must not draw with the random numbers of the first tokens again."""
    seeds = seeds_of_samples(request, seed)
    if request.num_sampled:
        seeds = [keyed_seed(seed, request.num_sampled) for seed in seeds]
    return seeds


def sample_seeds(request_seeds: Sequence[int], indices: Sequence[int]) -> list[int]:
    """A stream of its own for every (seed of a request, index of a sample); one seed serves all."""
    seeds = np.array([signed(seed) for seed in request_seeds])
    return scramble(scramble(seeds + GOLDEN) + np.array(indices)).tolist()


def signed(number: int) -> int:
    """Any integer as the 64-bit one with the same lowest bits."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def refuse_what_cannot_run(
    request: GenerationRequest, limits: EngineLimits, vocabulary: int, can_decode_text: bool
) -> None:
    name, length = f"request {request.request_id}", len(request.prompt_ids)
    max_tokens = limits.max_prompt_tokens + limits.max_response_tokens
    if not length:
        raise ValueError(f"{name} has an empty prompt; give it at least one token (BOS will do)")
    if length >= max_tokens:
        raise ValueError(
            f"{name} has a prompt of {length} tokens; prompt and response have room for "
            f"{max_tokens} together (rollout.prompt_length + rollout.response_length): raise them "
            "or shorten it"
        )
    if not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < vocabulary:
        raise ValueError(f"{name} has a token id outside the vocabulary of {vocabulary}")
    if not 0 <= request.num_sampled <= length:
        raise ValueError(
            f"{name} has num_sampled {request.num_sampled} and a prompt of {length} tokens; it "
            "counts the last prompt tokens that begin the response: 0 to all of them"
        )
    if request.media and max(one.places[-1] for one in request.media) >= length:
        raise ValueError(f"{name} has an image behind the end of its prompt of {length} tokens")
    if request.num_samples < 1:
        raise ValueError(f"{name} asks for {request.num_samples} samples; ask for 1 or more")
    if request.seeds is not None and len(request.seeds) != request.num_samples:
        raise ValueError(f"{name} has {len(request.seeds)} seeds for {request.num_samples} samples")
    for name_of, values in (("seeds", request.seeds), ("session_ids", request.session_ids)):
        if values is not None and len(values) != request.num_samples:
            raise ValueError(
                f"{name} has {len(values)} {name_of} for {request.num_samples} samples; "
                "give one for each sample"
            )
    if request.params.stop and not can_decode_text:
        raise ValueError(f"{name} has stop texts, but the engine was given no tokenizer")


CONTEXT_TOKENS = 8
"""Tokens decoded before the part that matters: a tokenizer may treat the first ones differently."""


def tokens_until_stop(
    token_ids: Sequence[int],
    num_new: int,
    stop: Sequence[str],
    decode_text: Callable[[list[int]], str],
) -> int | None:
    """How many tokens remain if the response ends with the first that completes one of the texts.

    None where none is complete. Only the last `num_new` tokens can complete one.
    """
    # A token is at least one byte, so a text that ends in a new token began within so many tokens.
    longest = max(len(text.encode()) for text in stop)
    first_end = len(token_ids) - num_new + 1
    start = max(0, first_end - longest - CONTEXT_TOKENS)

    def is_complete(end: int) -> bool:
        text = decode_text(list(token_ids[start:end]))
        return any(stop_text in text for stop_text in stop)

    if not is_complete(len(token_ids)):
        return None
    return next(end for end in range(first_end, len(token_ids) + 1) if is_complete(end))


def end_tokens(module: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Every token that ends a response: the model's, its generation config's, the tokenizer's."""
    ids: set[int] = set()
    stated: list[Any] = [tokenizer.eos_token_id, module.config.get_text_config().eos_token_id]
    if module.generation_config is not None:
        stated.append(module.generation_config.eos_token_id)
    for value in stated:
        if value is not None:
            ids.update([value] if isinstance(value, int) else value)
    return sorted(ids)

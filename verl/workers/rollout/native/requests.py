"""How much the engine takes on, and from a request to the groups that run.

What cannot run is refused here, before anything is queued.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from verl.workers.rollout.base import GenerationRequest
from verl.workers.rollout.native.sampler import sample_seeds
from verl.workers.rollout.native.sequence import Group, RunningRequest, Sample


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """How much the engine takes on at once."""

    max_num_seqs: int = 256
    """Most sequences that run at the same time, as far as `max_cache_bytes` has room for them."""

    max_prompt_tokens: int = 512
    """Length of a prompt slot. A longer prompt may run; it takes from the room for its response."""

    max_response_tokens: int = 512
    """Length of a response slot."""

    max_prefill_tokens: int = 8192
    """Most prompt tokens in one forward pass; a longer prompt runs alone."""

    max_cache_bytes: int = 4 << 30
    """Memory for keys and values of running sequences. Where it is too small for all at full
    length, kernels share it in pages; plain torch runs fewer at once."""

    max_session_bytes: int = 1 << 30
    """Memory for keys and values of finished turns of conversations."""

    max_stop_tokens: int = 32
    """Most token ids that end a response, the model's own included."""

    steps_per_visit: int = 4
    """Tokens that every sequence gets before the host looks at them. More save work on the host; a
    sequence that ends in between computes on in vain."""

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
    room = limits.max_response_tokens - max(0, len(prompt_ids) - limits.max_prompt_tokens)
    seeds = seeds_of_samples(request, seed)
    session_ids = request.session_ids or (None,) * request.num_samples
    running = RunningRequest(request=request)
    for start in range(0, request.num_samples, num_slots):
        group = Group(
            owner=running,
            prompt_ids=prompt_ids,
            num_shared=min(len(prompt_ids), max_shared),
            token_limit=min(params.max_tokens, room),
            stop_token_ids=tuple(sorted(stop_token_ids)),
        )
        for index in range(start, min(start + num_slots, request.num_samples)):
            group.samples.append(
                Sample(group=group, index=index, seed=seeds[index], session_id=session_ids[index])
            )
        running.groups.append(group)
    return running


def seeds_of_samples(request: GenerationRequest, seed: int) -> list[int]:
    """From the request's seed, unless each sample has its own."""
    if request.seeds is not None:
        return sample_seeds(request.seeds, [0] * request.num_samples)
    return sample_seeds([seed], range(request.num_samples))


def refuse_what_cannot_run(
    request: GenerationRequest, limits: EngineLimits, vocabulary: int, can_decode_text: bool
) -> None:
    name, length = f"request {request.request_id}", len(request.prompt_ids)
    room = limits.max_prompt_tokens + limits.max_response_tokens
    if not length:
        raise ValueError(f"{name} has an empty prompt; give it at least one token (BOS will do)")
    if length >= room:
        raise ValueError(
            f"{name} has a prompt of {length} tokens; prompt and response have room for {room} "
            "together (rollout.prompt_length + rollout.response_length): raise them or shorten it"
        )
    if not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < vocabulary:
        raise ValueError(f"{name} has a token id outside the vocabulary of {vocabulary}")
    if request.num_samples < 1:
        raise ValueError(f"{name} asks for {request.num_samples} samples; ask for 1 or more")
    if request.seeds is not None and len(request.seeds) != request.num_samples:
        raise ValueError(f"{name} has {len(request.seeds)} seeds for {request.num_samples} samples")
    for field in ("seeds", "session_ids"):
        values = vars(request)[field]
        if values is not None and len(values) != request.num_samples:
            raise ValueError(
                f"{name} has {len(values)} {field} for {request.num_samples} samples; "
                "give one for each sample"
            )
    if request.params.stop and not can_decode_text:
        raise ValueError(f"{name} has stop texts, but the engine was given no tokenizer")

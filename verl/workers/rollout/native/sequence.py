"""A prompt on its way through the engine, and each of its continuations. No tensors."""

from dataclasses import dataclass, field

from verl.workers.rollout.base import GenerationRequest, TokenOutput


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

    @property
    def num_tokens(self) -> int:
        return len(self.output.token_ids)

    @property
    def num_own(self) -> int:
        """Tokens in the sample's own slot: its response and what of the prompt is not shared."""
        return len(self.group.prompt_ids) - self.group.num_shared + self.num_tokens

    @property
    def token_ids(self) -> list[int]:
        """Prompt and response."""
        return self.group.prompt_ids + self.output.token_ids

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
    """Groups are numbered in the order in which they were queued first."""

    num_ended: int = 0
    """Samples that have left for good."""

    @property
    def request(self) -> GenerationRequest:
        return self.owner.request

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
        """What a prefill computes at most: the prompt, or all of every sample that ran before."""
        if self.has_tokens:
            return sum(len(self.prompt_ids) + sample.num_tokens for sample in self.unfinished)
        return len(self.prompt_ids)


class LostRequestError(RuntimeError):
    """The engine failed while a request ran; the cause is attached. The engine itself can go on."""


@dataclass(kw_only=True, eq=False)
class RunningRequest:
    """A request inside the engine."""

    request: GenerationRequest
    groups: list[Group] = field(default_factory=list)
    error: BaseException | None = None
    """What made the engine drop the request."""

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

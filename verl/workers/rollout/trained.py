"""The policy in training, as the checks see it that compare an engine with it (probe, drift check).

It sends its weights to the engine, scores given tokens as training does, and can do both with
scrambled weights. Scrambling changes signs in every tensor, so a
tensor that an engine left out makes its answers wrong; and it is its own inverse to the last bit,
so the trainer can scramble its weights in place, score, and have them back.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from hashlib import blake2b
from typing import NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from verl.models.lora import has_lora
from verl.utils.scramble import uniform
from verl.workers.engine.base import BaseEngine
from verl.workers.rollout.base import TokenOutput
from verl.workers.rollout.sequences import padded_sequences

NamedTensors = Iterable[tuple[str, Tensor]]

FLIPPED_SHARE = 0.2
"""Fraction of flipped columns. With half, a large model becomes so sure of nonsense that a wrong
tensor no longer shows; with few, a tensor is hardly wrong. Of 16 tensors of SmolLM2-135M each moves
log-probabilities by 0.26 at least with a fifth, by 0.13 with a tenth, by 0.01 with half."""

ZERO_STEP = 1.0
"""What the elements of a tensor of zeros (a bias before training) become when scrambled."""


class Answer(NamedTuple):
    """A prompt and the continuation that an engine returned."""

    prompt_ids: Sequence[int]
    output: TokenOutput


class TrainedPolicy(ABC):
    """Where several ranks hold the policy together, all make the same calls in the same order."""

    @property
    @abstractmethod
    def version(self) -> int:
        """How many updates the weights have seen."""

    @abstractmethod
    def send(self, *, is_scrambled: bool) -> None:
        """Bring the engine to these weights, or to `scrambled` ones; back when it holds them."""

    @abstractmethod
    def log_probs(self, answers: Sequence[Answer], *, temperature: float) -> list[Tensor]:
        """What training gives for the tokens of each answer, in fp32 on the CPU."""

    @abstractmethod
    def can_scramble(self) -> bool:
        """Whether `as_scrambled` is possible."""

    @abstractmethod
    def as_scrambled(self) -> AbstractContextManager[None]:
        """Score with scrambled weights while the context lasts."""


class LocalPolicy(TrainedPolicy):
    """The policy that `engine` trains in this process.

    `update` takes all weights and their version to the rollout engine, as
    `EngineProcess.update_weights` does. A rank that has no rollout engine gives a function that
    reads all weights, since a whole tensor may be put together from all ranks.
    """

    def __init__(self, engine: BaseEngine, update: Callable[[NamedTensors, int], object]) -> None:
        self._engine = engine
        self._update = update

    @property
    def version(self) -> int:
        return self._engine.policy_version

    def send(self, *, is_scrambled: bool) -> None:
        weights: NamedTensors = self._engine.get_per_tensor_param()
        if is_scrambled:
            weights = ((name, scrambled(name, weight)) for name, weight in weights)
        self._update(weights, self.version)

    def log_probs(self, answers: Sequence[Answer], *, temperature: float) -> list[Tensor]:
        return log_probs_of(self._engine, answers, temperature=temperature)

    def can_scramble(self) -> bool:
        """Whether weights can be scrambled in place: those with adapters or shards cannot."""
        return not has_lora(self._engine.module) and not self._engine.is_sharded

    @contextmanager
    def as_scrambled(self) -> Iterator[None]:
        with scrambled_in_place(self._engine.module):
            yield


def log_probs_of(
    engine: BaseEngine, answers: Sequence[Answer], *, temperature: float
) -> list[Tensor]:
    """What training gives for the tokens of each answer, in fp32 on the CPU."""
    prompts = [list(answer.prompt_ids) for answer in answers]
    responses = [answer.output.token_ids for answer in answers]
    columns = padded_sequences(
        prompts,
        responses,
        [[1] * len(response) for response in responses],
        prompt_length=max(map(len, prompts)),
        response_length=max(map(len, responses)),
        pad_token_id=0,  # masked: any token will do
    )
    scores = engine.infer_batch(
        TensorDict(columns, batch_size=len(answers)),  # pyright: ignore[reportArgumentType]
        micro_batching=[list(range(len(answers)))],  # on every rank one pass
        temperature=temperature,
    )
    rows = scores["log_probs"].float().cpu()
    return [row[: len(response)] for row, response in zip(rows, responses, strict=True)]


@contextmanager
def scrambled_in_place(module: nn.Module) -> Iterator[None]:
    """The module with the weights that `scrambled` gives; afterwards every bit is as before."""
    zeros = {name for name, weight in module.named_parameters() if not weight.any()}
    with torch.no_grad():
        for name, weight in module.named_parameters():
            weight.copy_(scrambled(name, weight))
    try:
        yield
    finally:
        with torch.no_grad():
            for name, weight in module.named_parameters():
                if name in zeros:
                    weight.zero_()
                else:
                    weight.copy_(scrambled(name, weight))


@torch.no_grad()
def scrambled(name: str, weight: Tensor) -> Tensor:
    """The weight with other signs in some of its columns, always the same ones for a name.

    Signs keep every number finite and in its format. Zeros, which have none, become `ZERO_STEP`.
    """
    num_columns = weight.shape[-1] if weight.dim() else 1
    seed = int.from_bytes(blake2b(name.encode(), digest_size=7).digest(), "big")
    draws = uniform(torch.full((num_columns,), seed), torch.arange(num_columns))
    signs = torch.where(draws < FLIPPED_SHARE, -1.0, 1.0)
    signs[0] = -1.0  # a tensor with a single column changes too
    signs = signs.to(weight) if weight.dim() else signs[0].to(weight)
    return weight * signs if bool(weight.any()) else signs.expand_as(weight) * ZERO_STEP

"""What a training engine is: a model and its optimizer, wherever their pieces live.

Everything above (actor, critic, supervised fine-tuning) makes two calls. `infer_batch` runs rows
through the model and gives columns back in row order. `train_batch` makes one optimizer step on one
mini-batch. Both cut the rows into micro-batches; the loss handed in is already divided by counts
over the whole mini-batch, so micro-batches add up and their number changes nothing.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

Columns = dict[str, Tensor]
"""What a model says about some rows: `log_probs` and `entropy`, or `values`; each (B, T)."""

LossFunction = Callable[[Columns, TensorDict], tuple[Tensor, dict[str, Any]]]
"""From the model's columns and the rows they belong to: the loss and what to report of it."""


@dataclass(frozen=True, kw_only=True)
class MicroBatching:
    """How many rows go through the model at once; exactly one of the two is set."""

    rows: int | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        if (self.rows is None) == (self.tokens is None):
            raise ValueError(
                f"micro-batches are cut by rows ({self.rows}) or by tokens ({self.tokens}); set one"
            )


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """What one optimizer step did."""

    loss: float
    grad_norm: float
    learning_rate: float
    is_applied: bool
    """False when loss or gradient was not finite; the weights are as before."""

    num_micro_batches: int
    metrics: list[dict[str, Any]] = field(default_factory=list)
    """What the loss function reported, one entry per micro-batch."""


class BaseEngine(ABC):
    """One rank's part of a model under training."""

    policy_version: int = 0
    """Optimizer steps applied so far; a rollout engine stamps it on every token."""

    @abstractmethod
    def initialize(self) -> None:
        """Load the model and build the optimizer. Called once, before anything else."""

    @abstractmethod
    def infer_batch(
        self,
        data: TensorDict,
        *,
        micro_batching: MicroBatching,
        temperature: float = 1.0,
        with_sum_pi_squared: bool = False,
    ) -> Columns:
        """Columns of every row, in row order, without gradients.

        A language model adds `sum_pi_squared` when asked; it costs a second output layer.
        """

    @abstractmethod
    def train_batch(
        self,
        data: TensorDict,
        loss_function: LossFunction,
        *,
        micro_batching: MicroBatching,
        temperature: float = 1.0,
    ) -> TrainResult:
        """One optimizer step on the rows of `data`; gradients are clear before and after."""

    @abstractmethod
    def lr_scheduler_step(self) -> None:
        """Advance the learning-rate schedule by one training step."""

    @abstractmethod
    def get_per_tensor_param(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight under its Hugging Face name, whole; tied weights once."""

    @abstractmethod
    def to(self, device: str, *, model: bool = True, optimizer: bool = True) -> None:
        """Move weights or optimizer state between this device and CPU memory."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Optimizer, schedule and counters; the weights are `get_per_tensor_param`."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken."""

    @abstractmethod
    def disable_adapter(self) -> AbstractContextManager[None]:
        """Run as the base model while the context lasts; no change when there is no adapter."""

    def get_data_parallel_rank(self) -> int:
        return 0

    def get_data_parallel_size(self) -> int:
        return 1

    def get_data_parallel_group(self) -> torch.distributed.ProcessGroup | None:
        return None

    def is_mp_src_rank_with_outputs(self) -> bool:
        """Whether this rank's outputs are the ones to collect."""
        return True

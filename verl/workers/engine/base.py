"""What a training engine is: a model and its optimizer, wherever their pieces live.

Everything above (actor, critic, supervised fine-tuning) makes two calls. `infer_batch` runs rows
through the model and gives columns back in row order. `train_batch` makes one optimizer step on one
mini-batch. Both cut the rows into micro-batches, or take the cut from the caller: on several ranks
all must make equally many passes, so one place decides for all (`verl.workers.schedule`). The loss
handed in is already divided by counts over the whole mini-batch of all ranks, so micro-batches and
ranks add up, and their number changes nothing.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from verl.workers.schedule import MicroBatching, Passes

Columns = dict[str, Tensor]
"""What a model says about some rows: `log_probs` and `entropy`, or `values`; each (B, T)."""

LossFunction = Callable[[Columns, TensorDict], tuple[Tensor, dict[str, Any]]]
"""From the model's columns and the rows they belong to: the loss and what to report of it."""


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
    """What the loss function reported, one entry per micro-batch; tensors are still on the device,
    so that no pass waits for the one before it."""

    num_oom_splits: int = 0
    """Micro-batches that did not fit into memory and were run in halves."""

    loss_scale: float | None = None
    """Factor on the loss in the backward pass; None where the number format needs none."""


class BaseEngine(ABC):
    """One rank's part of a model under training."""

    policy_version: int = 0
    """Optimizer steps applied so far; a rollout engine stamps it on every token."""

    sequence_group: torch.distributed.ProcessGroup | None = None
    """Ranks that hold the same rows and divide the tokens of a pass among them; None: no others.
    Gradients are summed over all ranks, these included."""

    @property
    def ranks_per_sequence(self) -> int:
        """Ranks that run a pass together; each has room for the tokens that one device takes."""
        group = self.sequence_group
        return 1 if group is None else torch.distributed.get_world_size(group)

    @abstractmethod
    def initialize(self) -> None:
        """Load the model and build the optimizer. Called once, before anything else."""

    @abstractmethod
    def infer_batch(
        self,
        data: TensorDict,
        *,
        micro_batching: MicroBatching | Passes,
        temperature: float = 1.0,
        with_sum_pi_squared: bool = False,
    ) -> Columns:
        """Columns of every row, in row order, without gradients; 0 for rows in no pass.

        A language model adds `sum_pi_squared` when asked; it costs a second output layer.
        """

    @abstractmethod
    def train_batch(
        self,
        data: TensorDict,
        loss_function: LossFunction,
        *,
        micro_batching: MicroBatching | Passes,
        temperature: float = 1.0,
    ) -> TrainResult:
        """One optimizer step on the rows of `data`; gradients are clear before and after.

        Rows that no pass names take no part. An empty pass is one over a single token without loss.
        """

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

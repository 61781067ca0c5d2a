"""The interface of a training engine: a model and its optimizer, wherever their shards live.

Roles (policy, critic, reference, supervised fine-tuning) make two calls. `infer_batch` runs rows
through the model and returns columns in row order. `train_batch` takes one optimizer step on one
mini-batch. Both split the rows into micro-batches, or take the split from the caller: on several
ranks all must run equally many, so `verl.workers.schedule` decides for all of them. The loss is
already divided by counts over the whole mini-batch of all ranks, so micro-batches and ranks add up
and their number does not change the gradient.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from transformers import PreTrainedModel

from verl.models.head import OutputHead
from verl.workers.engine.outputs import LOG_PROBS, Outputs
from verl.workers.engine.spec import EngineSpec
from verl.workers.schedule import MicroBatching, Passes

Columns = dict[str, Tensor]
"""Outputs of a model for some rows: `log_probs` and `entropy`, or `values`; each (B, T). `Outputs`
adds others."""

LossFunction = Callable[[Columns, TensorDict], tuple[Tensor, dict[str, Any]]]
"""From the model's columns and their rows to the loss and the metrics of a micro-batch."""


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """Outcome of one optimizer step."""

    loss: float
    grad_norm: float
    learning_rate: float
    is_applied: bool
    """False when loss or gradient was not finite; the weights are as before."""

    num_micro_batches: int
    metrics: list[dict[str, Any]] = field(default_factory=list)
    """Reports of the loss function, one per micro-batch; tensors are still on the device, so that
    no micro-batch waits for the one before it."""

    num_oom_splits: int = 0
    """Micro-batches that did not fit into memory and were run in halves."""

    loss_scale: float | None = None
    """Factor on the loss in the backward pass; None where the number format needs none."""


class BaseEngine(ABC):
    """One rank's part of a model under training."""

    module: PreTrainedModel
    device: torch.device

    has_collectives_in_forward: bool = False
    """Whether ranks exchange weights or activations inside a forward pass. Then all must run
    equally many micro-batches, and one that does not fit into memory ends the run."""

    is_sharded: bool = False
    """Whether a rank holds only its shard of every weight, so that a rollout needs a copy."""

    policy_version: int = 0
    """Optimizer steps applied so far; a rollout engine stamps it on every token."""

    sequence_group: torch.distributed.ProcessGroup | None = None
    """Ranks that hold the same rows and split the tokens of a micro-batch; None: no others.
    Gradients are summed over all ranks, these included."""

    routes: Any = None
    """`routes.RouteOptions` of a model with experts; None for any other."""

    @classmethod
    @abstractmethod
    def from_spec(cls, spec: EngineSpec) -> "BaseEngine":
        """Build the engine of this rank; `EngineRegistry.new` initializes it."""

    @property
    def ranks_per_sequence(self) -> int:
        """Ranks that run a micro-batch together, each with the token budget of one device."""
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
        outputs: Outputs = LOG_PROBS,
    ) -> Columns:
        """Columns of every row, in row order, without gradients; 0 for rows in no micro-batch.

        A language model adds what `outputs` asks for.
        """

    @abstractmethod
    def train_batch(
        self,
        data: TensorDict,
        loss_function: LossFunction,
        *,
        micro_batching: MicroBatching | Passes,
        temperature: float = 1.0,
        outputs: Outputs = LOG_PROBS,
    ) -> TrainResult:
        """One optimizer step on the rows of `data`; gradients are clear before and after.

        The loss gets the columns that `outputs` asks for too.
        Rows in no micro-batch take no part. An empty micro-batch runs one token without a loss.
        """

    @abstractmethod
    def response_states(self, rows: TensorDict) -> Tensor:
        """(B, T, hidden), the last hidden states that predict the response tokens, of one
        micro-batch and without gradients. For a pass inside another engine's."""

    @abstractmethod
    def output_head(self) -> OutputHead:
        """The output layer of a language model, its weights whole; every rank must ask."""

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

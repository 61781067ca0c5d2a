"""The step protocol that engines have in common: micro-batches, gradients, one optimizer step.

    train_batch    zero gradients -> micro-batches (forward, loss, backward) -> optimizer step
    infer_batch    micro-batches (forward) -> columns

`SteppingEngine` composes the parts: `forward` computes columns, `passes` decides what runs at once
and splits what does not fit, `residency` keeps weights and activations where they belong, and
`optimizer` steps. A sibling (`one_device`, `zero1`, `fsdp`) loads the module and builds the
optimizer; one with another forward pass overrides `forward`.
"""

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from transformers import PreTrainedModel

from verl.config.optimizer import FSDPOptimizerConfig
from verl.models.head import OutputHead
from verl.models.lora import hf_weights, without_adapters
from verl.models.routing import Routing
from verl.models.ulysses import refuse_unshardable
from verl.utils.distributed import all_reduce_
from verl.workers.engine.base import BaseEngine, Columns, LossFunction, TrainResult
from verl.workers.engine.forward import (
    forward_rows,
    put_rows,
    row_lengths,
    rows_on_device,
    rows_on_host,
    sum_of_columns,
    take_rows,
)
from verl.workers.engine.memory import CudaMemory, DeviceMemory, MemoryOptions, full_rows, has_room
from verl.workers.engine.optimizer import MasterOptimizer
from verl.workers.engine.outputs import LOG_PROBS, Outputs
from verl.workers.engine.passes import GradientArrivals, PassScheduler
from verl.workers.engine.residency import Residency
from verl.workers.engine.routes import RouteOptions
from verl.workers.engine.sharding import RankGroups
from verl.workers.schedule import MicroBatching, Passes

logger = logging.getLogger(__name__)

MICRO_BATCHES_IN_16_BITS = 32
"""How many are summed in 16 bits. None of the gradient's length is lost by then, and its direction
is off by less than a hundredth; rounding the sum once costs a quarter of that."""


Report = tuple[Tensor, dict[str, Any]]
"""The loss of a micro-batch, and what the loss function reports of it."""


@dataclass(frozen=True)
class PassRequest:
    """What the micro-batches of one call have in common."""

    data: TensorDict
    lengths: list[int]
    """Tokens of each row."""

    temperature: float
    outputs: Outputs


class SteppingEngine(BaseEngine):
    """A causal language model or a value model as a Hugging Face module, and its optimizer."""

    sums_in_fp32: bool = False
    """Whether gradients of micro-batches are added in fp32 already."""

    def __init__(
        self,
        build_model: Callable[[], PreTrainedModel],
        optimizer_config: FSDPOptimizerConfig | None = None,
        *,
        max_grad_norm: float = 1.0,
        is_value_model: bool = False,
        gradient_checkpointing: bool = False,
        prefix_sharing: bool = False,
        memory: MemoryOptions | None = None,
        device_memory: DeviceMemory | None = None,
        ranks: RankGroups | None = None,
    ) -> None:
        """`device_memory` is what the micro-batch probe measures; None asks CUDA.

        `ranks` are the process groups of an engine on several ranks; None is a rank alone.
        """
        self._build_model = build_model
        self._optimizer_config = optimizer_config
        self._max_grad_norm = max_grad_norm
        self._is_value_model = is_value_model
        self._gradient_checkpointing = gradient_checkpointing
        self.prefix_sharing = prefix_sharing
        self.memory = memory or MemoryOptions()
        self._device_memory = device_memory
        self.ranks = ranks
        self.sequence_group = None if ranks is None else ranks.sequence
        self.optimizer: MasterOptimizer | None = None
        self._compute_device: torch.device | None = None  # the weights' own

    # ---- what siblings supply --------------------------------------------------------------------

    @abstractmethod
    def load_module(self) -> PreTrainedModel:
        """The module with its weights, on the device or where they stay between passes."""

    @abstractmethod
    def build_optimizer(self, config: FSDPOptimizerConfig) -> MasterOptimizer:
        """The optimizer of this rank's weights, or of its shard of them."""

    def trained_part(self) -> nn.Module:
        """What this rank runs and trains, where that is not the module itself."""
        return self.module

    def enable_checkpointing(self) -> None:
        """Compute activations again in the backward pass instead of keeping them."""
        self.module.gradient_checkpointing_enable({"use_reentrant": False})

    def forward(
        self, rows: TensorDict, temperature: float, outputs: Outputs = LOG_PROBS
    ) -> Columns:
        """Columns of a micro-batch; what `outputs` needs before the pass is in it already."""
        return forward_rows(
            self.module,
            rows,
            device=self.device,
            temperature=temperature,
            is_value_model=self._is_value_model,
            prefix_sharing=self.prefix_sharing,
            outputs=outputs,
            sequence_group=self.sequence_group,
            routes=self.routes,
        )

    def begin_micro_batch(self, *, is_last: bool) -> None:
        """Runs before each micro-batch of a training step."""

    def end_passes(self) -> None:
        """Runs after the last micro-batch of a call, before the optimizer step."""

    # ---- the protocol ----------------------------------------------------------------------------

    def initialize(self) -> None:
        self.module = self.load_module()
        self.trained = self.trained_part()
        routing = Routing.of(self.module)
        if routing is not None and not self._is_value_model:
            self.routes = RouteOptions(routing)
        if self.sequence_group is not None:
            refuse_unshardable(self.module, self.sequence_group)
        self.device = self._compute_device or next(self.module.parameters()).device
        if self._optimizer_config is None:
            self.trained.requires_grad_(False)
        else:
            if self._gradient_checkpointing:
                self.enable_checkpointing()
            self.optimizer = self.build_optimizer(self._optimizer_config)
        device_memory = self._device_memory
        if device_memory is None and self.device.type == "cuda":
            device_memory = CudaMemory(self.device)
        is_alone = not self.has_collectives_in_forward
        self.passes = PassScheduler(
            device_memory,
            can_split=is_alone and self.sequence_group is None,
            probe=self.memory.probe_micro_batch,
        )
        self._arrivals = GradientArrivals(self.trained.parameters())
        self._gradient_sums = GradientSums(
            () if self.sums_in_fp32 else self.trained.parameters(),
            partial(has_room, device_memory),
        )
        self.residency = Residency(self.trained, self.device, self.memory, can_compile=is_alone)

    @torch.no_grad()
    def infer_batch(
        self,
        data: TensorDict,
        *,
        micro_batching: MicroBatching | Passes,
        temperature: float = 1.0,
        outputs: Outputs = LOG_PROBS,
    ) -> Columns:
        self.trained.eval()
        columns: Columns = {}
        data = rows_on_host(data)
        request = PassRequest(data, row_lengths(data), temperature, outputs)
        with self.residency.in_use():
            schedule = self.schedule(data, request.lengths, micro_batching)
            for rows, found in self.infer_passes(request, schedule):
                put_rows(columns, found, rows, len(data))
        self.end_passes()
        return columns

    def infer_passes(
        self, request: PassRequest, schedule: Passes
    ) -> Iterator[tuple[list[int], Columns]]:
        """Rows that ran at once, with their columns."""

        def run(rows: list[int]) -> tuple[list[int], Columns]:
            micro_batch = take_rows(request.data, rows)
            given = request.outputs.given(micro_batch)
            return rows, self.forward(micro_batch, request.temperature, given)

        for scheduled in schedule:
            yield from self.passes.inference.run(scheduled, request.lengths, run)

    def train_batch(
        self,
        data: TensorDict,
        loss_function: LossFunction,
        *,
        micro_batching: MicroBatching | Passes,
        temperature: float = 1.0,
        outputs: Outputs = LOG_PROBS,
    ) -> TrainResult:
        """One step on the rows of all ranks; `loss` is their sum, `metrics` are this rank's.

        A gradient that overflows in fp16 because of the loss scale is computed again with half of
        it, so no rows are lost. Where even the plain loss overflows the step is skipped and the
        scale is what it was. All ranks see the same norm and do the same.
        """
        optimizer, training = self.require_optimizer(), self.passes.training
        scale, num_splits = optimizer.loss_scale, training.num_splits
        first_scale = None if scale is None else scale.value
        data = rows_on_host(data)
        request = PassRequest(data, row_lengths(data), temperature, outputs)
        with self.residency.in_use():
            while True:
                optimizer.zero_grad()
                self._gradient_sums.clear()
                loss_scale = None if scale is None else scale.value
                self.trained.train()  # for gradient checkpointing; dropout is 0 everywhere
                schedule = self._training_schedule(data, request.lengths, micro_batching)
                reports = self.train_passes(request, schedule, loss_function)
                self.trained.eval()
                self.end_passes()
                self._gradient_sums.restore()
                step = optimizer.step(self._max_grad_norm)
                self.policy_version += step.is_applied
                if step.is_applied or loss_scale is None or loss_scale <= 1:
                    break
        if scale is not None and first_scale is not None and not step.is_applied:
            scale.value = first_scale
        loss, num_oom_splits = self._sum_over_ranks(
            sum(torch.stack([loss for loss, _ in reports]).tolist()) if reports else 0.0,
            training.num_splits - num_splits,
        )
        return TrainResult(
            loss=loss,
            grad_norm=step.grad_norm,
            learning_rate=optimizer.learning_rate,
            is_applied=step.is_applied,
            num_micro_batches=len(reports),
            metrics=[report for _, report in reports],
            num_oom_splits=int(num_oom_splits),
            loss_scale=loss_scale,
        )

    def train_passes(
        self, request: PassRequest, schedule: Passes, loss_function: LossFunction
    ) -> list[Report]:
        """Add all micro-batches to the gradient."""
        run = partial(
            self._train_pass, request.data, loss_function, request.temperature, request.outputs
        )
        reports: list[Report] = []
        for index, rows in enumerate(schedule):
            self.begin_micro_batch(is_last=index == len(schedule) - 1)
            ended = self.passes.training.run(rows, request.lengths, run, self._arrivals.frozen)
            self._gradient_sums.count(len(ended))
            reports += ended
        return reports

    def _train_pass(
        self,
        data: TensorDict,
        loss_function: LossFunction,
        temperature: float,
        outputs: Outputs,
        rows: list[int],
    ) -> Report:
        """Add a micro-batch to the gradient. Loss and report stay on the device, so that the next
        micro-batch is enqueued without waiting."""
        self._arrivals.clear()
        micro_batch = take_rows(data, rows)
        outputs = outputs.given(micro_batch)
        with self.residency.during_forward():
            columns = self.forward(micro_batch, temperature, outputs)
            loss, report = loss_function(columns, rows_on_device(micro_batch, self.device))
        scale = self.require_optimizer().loss_scale
        (loss if scale is None else loss * scale.value).backward()
        return loss.detach(), report

    def schedule(
        self, data: TensorDict, lengths: list[int], micro_batching: MicroBatching | Passes
    ) -> Passes:
        """The rows of each micro-batch."""
        return self.passes.schedule(
            data, lengths, micro_batching, prefix_sharing=self.prefix_sharing
        )

    def _training_schedule(
        self, data: TensorDict, lengths: list[int], micro_batching: MicroBatching | Passes
    ) -> Passes:
        """The same; micro-batches have the size that the probe has found, if it is asked for."""

        def run_rows(num_rows: int) -> None:
            rows = full_rows(data, num_rows, self.module.config.get_text_config().vocab_size)
            self._train_pass(rows, sum_of_columns, 1.0, LOG_PROBS, list(range(num_rows)))

        optimizer = self.require_optimizer()
        return self.passes.with_measured_size(
            self.schedule(data, lengths, micro_batching),
            lengths,
            run_rows,
            row_tokens=data["input_ids"].shape[1],
            bytes_to_come=optimizer.bytes_to_come,
            discard=optimizer.zero_grad,
        )

    def _sum_over_ranks(self, *values: float) -> list[float]:
        if self.ranks is None:
            return list(values)
        return all_reduce_(
            torch.tensor(values, dtype=torch.float64), group=self.ranks.data
        ).tolist()

    @torch.no_grad()
    def response_states(self, rows: TensorDict) -> Tensor:
        with self.residency.in_use():
            return self.forward(rows_on_host(rows), 1.0, Outputs(states=True))["states"]

    def output_head(self) -> OutputHead:
        head = OutputHead.of(self.module)
        return replace(head, weight=head.weight.detach())

    # ---- weights and state -----------------------------------------------------------------------

    def lr_scheduler_step(self) -> None:
        self.require_optimizer().schedule.step()

    def get_per_tensor_param(self) -> Iterator[tuple[str, Tensor]]:
        yield from hf_weights(self.module)  # tied weights appear once

    def to(self, device: str, *, model: bool = True, optimizer: bool = True) -> None:
        if torch.device(device).type != self.device.type:
            raise ValueError(
                f"this engine stays on {self.device}, where a rollout engine may share its "
                f"weights, and is not moved to {device}; choose what is offloaded to CPU memory "
                "when it is built (fsdp_config.optimizer_offload, fsdp_config.param_offload)"
            )

    def state_dict(self) -> dict[str, Any]:
        return {
            "policy_version": self.policy_version,
            "optimizer": self.require_optimizer().state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with self.residency.in_use():  # a weight that is its own master has its moments beside it
            self.require_optimizer().load_state_dict(state["optimizer"])
        self.policy_version = int(state["policy_version"])

    def disable_adapter(self) -> AbstractContextManager[None]:
        return without_adapters(self.module)

    def require_optimizer(self) -> MasterOptimizer:
        if self.optimizer is None:
            raise ValueError("this engine was built without an optimizer and only runs forward")
        return self.optimizer

    # ---- ranks -----------------------------------------------------------------------------------

    def get_data_parallel_rank(self) -> int:
        return 0 if self.ranks is None else torch.distributed.get_rank(self.ranks.data)

    def get_data_parallel_size(self) -> int:
        return 1 if self.ranks is None else torch.distributed.get_world_size(self.ranks.data)

    def get_data_parallel_group(self) -> torch.distributed.ProcessGroup | None:
        return None if self.ranks is None else self.ranks.data

    def is_mp_src_rank_with_outputs(self) -> bool:
        group = self.sequence_group
        return group is None or torch.distributed.get_rank(group) == 0


class GradientSums:
    """Gradients of many micro-batches, summed in fp32, of parameters that are trained in 16 bits.

    A backward pass adds to a gradient in the parameter's own dtype. bf16 has eight bits, so a
    summand below a 256th of the sum changes nothing: of 1,024 equal ones, three quarters would be
    lost. So after some micro-batches the sum moves to fp32, and back before the optimizer step. A
    step of few micro-batches does without, and so does one for whose sums the device has no memory
    (`has_room(num_bytes)`), which is reported once.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        has_room: Callable[[int], bool] = lambda num_bytes: True,
    ) -> None:
        self._parameters = [p for p in parameters if p.requires_grad and p.element_size() < 4]
        self._has_room = has_room
        self._has_warned = False
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._num_pending = 0

    def clear(self) -> None:
        self._sums.clear()
        self._num_pending = 0

    def count(self, num_micro_batches: int) -> None:
        """So many more micro-batches have been added to the gradients."""
        self._num_pending += num_micro_batches
        if self._num_pending >= MICRO_BATCHES_IN_16_BITS:
            self._num_pending = 0
            if self._sums or self._can_begin():
                self._accumulate()

    @torch.no_grad()
    def restore(self) -> None:
        """Set each gradient to its sum over all micro-batches."""
        if self._sums:
            self._accumulate()
        while self._sums:
            parameter, total = self._sums.popitem()
            parameter.grad = total.to(parameter.dtype)
        self._num_pending = 0

    @torch.no_grad()
    def _accumulate(self) -> None:
        for parameter in self._parameters:
            if parameter.grad is None:
                continue
            if parameter in self._sums:
                self._sums[parameter] += parameter.grad
            else:
                self._sums[parameter] = parameter.grad.float()
            parameter.grad = None

    def _can_begin(self) -> bool:
        num_bytes = sum(4 * p.numel() for p in self._parameters if p.grad is not None)
        if self._has_room(num_bytes):
            return True
        if not self._has_warned:
            logger.warning(
                "a step of more than %d micro-batches sums its gradients in 16 bits, because the "
                "device has no memory for sums in fp32 (%.1f GiB): small summands lose bits. Use "
                "fewer, larger micro-batches (actor.ppo_max_token_len_per_gpu), or keep the "
                "optimizer's state in CPU memory (fsdp_config.optimizer_offload=True). This is "
                "logged once",
                MICRO_BATCHES_IN_16_BITS,
                num_bytes / 2**30,
            )
            self._has_warned = True
        return False

"""Training on one device: the Hugging Face module itself, its weights stored once.

Nothing is wrapped or sharded, so parameters keep their addresses for the life of the process and
the built-in rollout engine generates with the very same storage. (Weights that nobody shares may
wait in CPU memory between calls; that is `MemoryOptions.param_offload`.)
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch
from tensordict import TensorDict
from torch import Tensor
from transformers import PreTrainedModel

from verl.config.optimizer import FSDPOptimizerConfig
from verl.models.compiled import CompiledLayers
from verl.models.forward import hidden_states, packed_layout
from verl.models.head import OutputHead, sum_squared_probs, token_log_probs
from verl.models.kernels.availability import can_run_triton
from verl.models.lora import hf_weights, without_adapters
from verl.models.picked_rows import picked_rows
from verl.models.ulysses import SequenceShare, UlyssesLayout, refuse_undividable
from verl.models.value import score_head
from verl.utils.device import without_waiting
from verl.workers.engine.base import BaseEngine, Columns, LossFunction, MicroBatching, TrainResult
from verl.workers.engine.gradient_sums import GradientSums
from verl.workers.engine.memory import (
    CudaMemory,
    DeviceMemory,
    MemoryOptions,
    full_rows,
    probe_token_budget,
)
from verl.workers.engine.offload import OffloadedActivations, OffloadedWeights
from verl.workers.engine.open_step import OpenStep
from verl.workers.engine.optimizer import MasterOptimizer, StepResult
from verl.workers.engine.out_of_memory import FittingPasses, GradientArrivals, fill
from verl.workers.engine.packing import PackedRows, pack_rows
from verl.workers.engine.shared_packing import pack_shared_rows, prompt_groups
from verl.workers.schedule import Passes, cut

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
ROW_COLUMNS = ("input_ids", "attention_mask", "position_ids", "responses")
USABLE_SHARE = 0.97
"""Of the device's memory; the rest is lost between what is allocated."""


class OneDeviceEngine(BaseEngine):
    """A causal language model or a value model on one device."""

    meets_others_in_a_pass: bool = False
    """Whether ranks wait for each other inside a pass. Then none may make more passes than the
    others, and a pass that does not fit into memory ends the run."""

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
    ) -> None:
        """`device_memory` measures what the probe of micro-batches looks at; None asks CUDA."""
        self._build_model = build_model
        self._optimizer_config = optimizer_config
        self._max_grad_norm = max_grad_norm
        self._is_value_model = is_value_model
        self._gradient_checkpointing = gradient_checkpointing
        self._prefix_sharing = prefix_sharing
        self._memory = memory or MemoryOptions()
        self._device_memory = device_memory
        self._is_probe_due = self._memory.probe_micro_batch
        self._token_budget: int | None = None
        self._open_step: OpenStep | None = None
        self._training = FittingPasses("ppo_max_token_len_per_gpu or ppo_micro_batch_size_per_gpu")
        self._inference = FittingPasses(
            "log_prob_max_token_len_per_gpu or log_prob_micro_batch_size_per_gpu (of a critic: "
            "forward_max_token_len_per_gpu or forward_micro_batch_size_per_gpu)"
        )

    def initialize(self) -> None:
        self.module = self._build_model()
        if self.sequence_group is not None:
            refuse_undividable(self.module, self.sequence_group)
        self.device = next(self.module.parameters()).device
        if self._gradient_checkpointing and self._optimizer_config is not None:
            self.module.gradient_checkpointing_enable({"use_reentrant": False})
        if self._optimizer_config is None:
            self.module.requires_grad_(False)
            self.optimizer = None
        else:
            self.optimizer = self._build_optimizer(self._optimizer_config)
        self._arrivals = GradientArrivals(self.module.parameters())
        self._gradient_sums = GradientSums(
            [] if self.meets_others_in_a_pass else self.module.parameters(), self._has_room
        )
        self._activations = OffloadedActivations(self.module)
        self._weights = self._compiled = None
        if self._memory.param_offload:
            self._weights = OffloadedWeights(self.module, self.device)
        is_gpu = self.device.type == "cuda" and can_run_triton(self.device)
        if self._memory.use_torch_compile and is_gpu and not self.meets_others_in_a_pass:
            self._compiled = CompiledLayers(self.module)

    @torch.no_grad()
    def infer_batch(
        self,
        data: TensorDict,
        *,
        micro_batching: MicroBatching | Passes,
        temperature: float = 1.0,
        with_sum_pi_squared: bool = False,
    ) -> Columns:
        def make_pass(rows: list[int]) -> tuple[list[int], Columns]:
            return rows, self._forward(take_rows(data, rows), temperature, with_sum_pi_squared)

        self.module.eval()
        columns: Columns = {}
        data = with_rows_on_host(data)
        lengths = row_lengths(data)
        with self._in_use():
            for scheduled in self._schedule(data, lengths, micro_batching):
                for rows, found in self._run(self._inference, scheduled, lengths, make_pass):
                    put_rows(columns, found, rows, len(data))
        return columns

    def train_batch(
        self,
        data: TensorDict,
        loss_function: LossFunction,
        *,
        micro_batching: MicroBatching | Passes,
        temperature: float = 1.0,
    ) -> TrainResult:
        def attempt() -> TrainResult:
            self.begin_step()
            self._add_passes(data, loss_function, micro_batching, temperature)
            return self._close_step(gradient_factor=1.0)

        num_splits = self._training.num_splits
        with self._in_use():
            result = self._repeat_until_in_range(attempt)
        return replace(result, num_oom_splits=self._training.num_splits - num_splits)

    # ---- a step whose rows come bit by bit -------------------------------------------------------

    def begin_step(self) -> None:
        """Start a step anew; what an earlier one has left open is forgotten."""
        optimizer = self._require_optimizer()
        optimizer.zero_grad()
        self._gradient_sums.clear()
        scale = None if optimizer.loss_scale is None else optimizer.loss_scale.value
        self._open_step = OpenStep(self._training.num_splits, scale)

    def add_to_step(
        self,
        data: TensorDict,
        loss_function: LossFunction,
        *,
        micro_batching: MicroBatching | Passes,
        temperature: float = 1.0,
    ) -> None:
        """Add the gradient of these rows. With rows in CPU memory nothing waits for the device."""
        with self._in_use():
            self._add_passes(data, loss_function, micro_batching, temperature)

    def finish_step(self, gradient_factor: float = 1.0) -> TrainResult:
        """Make the optimizer step; gradient and loss are multiplied by `gradient_factor` first.

        Unlike `train_batch` it cannot repeat passes whose fp16 gradient overflowed: such a step is
        left out. Ranks are not told of each other's losses.
        """
        with self._in_use():
            return self._close_step(gradient_factor)

    def _add_passes(
        self,
        data: TensorDict,
        loss_function: LossFunction,
        micro_batching: MicroBatching | Passes,
        temperature: float,
    ) -> None:
        def make_pass(rows: list[int]) -> tuple[Tensor, dict[str, Any]]:
            return self._train_pass(take_rows(data, rows), loss_function, temperature)

        data = with_rows_on_host(data)
        passes, lengths = self._require_open_step().passes, row_lengths(data)
        self.module.train()  # for gradient checkpointing; dropout is 0 everywhere
        for rows in self._training_schedule(data, lengths, micro_batching):
            made = self._run(self._training, rows, lengths, make_pass, self._arrivals.frozen)
            self._gradient_sums.count_passes(len(made))
            passes += made
        self.module.eval()

    def _has_room(self, num_bytes: int) -> bool:
        """Whether passes like those so far would fit beside so many bytes more."""
        memory = self._measured_memory()
        if memory is None:
            return True
        return memory.peak_bytes() + num_bytes <= USABLE_SHARE * memory.total_bytes

    def _measured_memory(self) -> DeviceMemory | None:
        """None where there is nothing to measure."""
        if self._device_memory is None and self.device.type == "cuda":
            return CudaMemory(self.device)
        return self._device_memory

    def _close_step(self, gradient_factor: float) -> TrainResult:
        step = self._require_open_step()
        self._open_step = None
        self._gradient_sums.give_back()
        return step.result(
            self._optimizer_step(gradient_factor),
            learning_rate=self._require_optimizer().learning_rate,
            num_splits=self._training.num_splits,
            gradient_factor=gradient_factor,
        )

    def _require_open_step(self) -> OpenStep:
        if self._open_step is None:
            raise ValueError("no step is open; call begin_step() before rows are added to it")
        return self._open_step

    def lr_scheduler_step(self) -> None:
        self._require_optimizer().schedule.step()

    def get_per_tensor_param(self) -> Iterator[tuple[str, Tensor]]:
        yield from hf_weights(self.module)  # tied weights appear once

    def to(self, device: str, *, model: bool = True, optimizer: bool = True) -> None:
        if torch.device(device).type != self.device.type:
            raise ValueError(
                f"this engine stays on {self.device}, where a rollout engine may share its "
                f"weights, and is not moved to {device}; what may wait in CPU memory is said when "
                "it is built (fsdp_config.optimizer_offload, fsdp_config.param_offload)"
            )

    def state_dict(self) -> dict[str, Any]:
        return {
            "policy_version": self.policy_version,
            "optimizer": self._require_optimizer().state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with self._in_use():  # where a weight is its own master, its moments go where it is
            self._require_optimizer().load_state_dict(state["optimizer"])
        self.policy_version = int(state["policy_version"])

    def disable_adapter(self) -> AbstractContextManager[None]:
        return without_adapters(self.module)

    def _schedule(
        self, data: TensorDict, lengths: list[int], micro_batching: MicroBatching | Passes
    ) -> Passes:
        if not isinstance(micro_batching, MicroBatching):
            return micro_batching
        groups = prompt_groups(data) if self._prefix_sharing else None
        return cut(lengths, micro_batching, groups)

    def _training_schedule(
        self, data: TensorDict, lengths: list[int], micro_batching: MicroBatching | Passes
    ) -> Passes:
        """As the caller wants it, or the same rows in passes of the size that was measured."""
        schedule = self._schedule(data, lengths, micro_batching)
        if self._is_probe_due and any(schedule):
            self._is_probe_due = False
            self._token_budget = self._probe(data, lengths, schedule)
        if self._token_budget is None or not any(schedule):
            return schedule
        return fill([row for rows in schedule for row in rows], lengths, self._token_budget)

    def _probe(self, data: TensorDict, lengths: list[int], schedule: Passes) -> int | None:
        """How many tokens fit; None where memory cannot be measured or ranks meet in a pass."""
        memory = self._measured_memory()
        if memory is None or self._is_bound_to_others:
            reason = (
                "ranks meet inside a pass"
                if memory
                else f"there is nothing to measure on {self.device}"
            )
            logger.warning("probe_micro_batch has no effect: %s", reason)
            return None
        vocabulary = self.module.config.get_text_config().vocab_size
        optimizer = self._require_optimizer()

        def run_rows(num_rows: int) -> None:
            self._train_pass(full_rows(data, num_rows, vocabulary), sum_of_columns, 1.0)

        budget = probe_token_budget(
            run_rows,
            memory,
            row_tokens=data["input_ids"].shape[1],
            start_tokens=max(sum(lengths[row] for row in rows) for rows in schedule),
            max_tokens=sum(lengths[row] for rows in schedule for row in rows),
            bytes_to_come=optimizer.bytes_to_come(),
        )
        optimizer.zero_grad()
        return budget

    def _run(
        self,
        passes: FittingPasses,
        rows: list[int],
        lengths: list[int],
        make_pass: Callable[[list[int]], Result],
        before_halves: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> list[Result]:
        if self._is_bound_to_others:
            return [make_pass(rows)]
        return passes.run(rows, lengths, make_pass, before_halves)

    @property
    def _is_bound_to_others(self) -> bool:
        return self.meets_others_in_a_pass or self.sequence_group is not None

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """Weights are on the device, and what is compiled runs so, while the context lasts."""
        with ExitStack() as stack:
            if self._weights is not None:
                stack.enter_context(self._weights.on_device())
            if self._compiled is not None:
                stack.enter_context(self._compiled.on())
            yield

    def _repeat_until_in_range(self, attempt: Callable[[], TrainResult]) -> TrainResult:
        """The attempt that counts.

        A gradient that overflows in fp16 because of the scale is computed again with half of it, so
        no rows are lost. Where even the plain loss overflows it is not the scale's fault: the step
        is left out and the scale is what it was. All ranks see the same norm and do the same.
        """
        scale = self._require_optimizer().loss_scale
        if scale is None:
            return attempt()
        first = scale.value
        result = attempt()
        while not result.is_applied and result.loss_scale is not None and result.loss_scale > 1:
            result = attempt()
        if not result.is_applied:
            scale.value = first
        return result

    def _train_pass(
        self, micro_batch: TensorDict, loss_function: LossFunction, temperature: float
    ) -> tuple[Tensor, dict[str, Any]]:
        """Add the micro-batch to the gradient. Loss and report stay on the device until all passes
        are made."""
        self._arrivals.clear()
        keeps = self._activations.during_forward() if self._memory.activation_offload else None
        with keeps or nullcontext():
            columns = self._forward(micro_batch, temperature)
            loss, report = loss_function(columns, self._on_device(micro_batch))
        scale = self._require_optimizer().loss_scale
        (loss if scale is None else loss * scale.value).backward()
        return loss.detach(), report

    def _on_device(self, rows: TensorDict) -> TensorDict:
        columns: Any = {name: without_waiting(rows[name], self.device) for name in rows.keys()}  # noqa: SIM118
        return TensorDict(columns, batch_size=rows.batch_size)

    def _forward(
        self, rows: TensorDict, temperature: float, with_sum_pi_squared: bool = False
    ) -> Columns:
        ids, mask, positions, responses = (rows[name] for name in ROW_COLUMNS)
        pack = pack_shared_rows if self._prefix_sharing else pack_rows
        packed = pack(ids, mask, positions, responses.shape[1]).to(self.device)
        layout = packed_layout(self.module, packed.parts)
        if self.sequence_group is not None:
            share = SequenceShare(len(packed.input_ids), packed.sources, self.sequence_group)
            packed, layout = packed.part(share), UlyssesLayout(layout, share)
        hidden = hidden_states(self.module, packed.input_ids, packed.position_ids, layout)
        if self._is_value_model:
            return {"values": packed.unpack(self._values(hidden, packed))}
        head, sources = OutputHead.of(self.module), picked_rows(hidden, packed.sources)
        log_probs, entropy = token_log_probs(sources, head, packed.targets, temperature=temperature)
        columns = {"log_probs": log_probs, "entropy": entropy}
        if with_sum_pi_squared:
            columns["sum_pi_squared"] = sum_squared_probs(sources, head, temperature=temperature)
        return {name: packed.unpack(values) for name, values in columns.items()}

    def _values(self, hidden: Tensor, packed: PackedRows) -> Tensor:
        return score_head(self.module)(picked_rows(hidden, packed.sources)).squeeze(-1).float()

    def _build_optimizer(self, config: FSDPOptimizerConfig) -> MasterOptimizer:
        return MasterOptimizer(
            self.module.named_parameters(), config, offload=self._memory.optimizer_offload
        )

    def _optimizer_step(self, gradient_factor: float) -> StepResult:
        optimizer = self._require_optimizer()
        result = optimizer.step(self._max_grad_norm, gradient_factor)
        self.policy_version += result.is_applied
        return result

    def _require_optimizer(self) -> MasterOptimizer:
        if self.optimizer is None:
            raise ValueError("this engine was built without an optimizer and only runs forward")
        return self.optimizer


def row_lengths(data: TensorDict) -> list[int]:
    """Tokens of each row."""
    return data["attention_mask"].sum(1).tolist()


def sum_of_columns(columns: Columns, rows: TensorDict) -> tuple[Tensor, dict[str, Any]]:
    """A loss that every output takes part in, for passes whose gradient is thrown away."""
    return torch.stack([column.sum() for column in columns.values()]).sum(), {}


def with_rows_on_host(data: TensorDict) -> TensorDict:
    """The same batch with what packing reads in CPU memory.

    On a device every pass would wait for the one before it, only to learn the lengths of its rows.
    A batch that has a device of its own would send them back there.
    """
    on_host: Any = {name: data[name].cpu() for name in ROW_COLUMNS}
    return data.copy().clear_device_().update(on_host)


def put_rows(columns: Columns, found: Columns, rows: list[int], num_rows: int) -> None:
    """Write what a pass has found for its rows into the columns of all, without waiting."""
    for name, part in found.items():
        if name not in columns:
            columns[name] = part.new_zeros(num_rows, *part.shape[1:])
        index = without_waiting(torch.tensor(rows, dtype=torch.long), part.device)
        columns[name].index_copy_(0, index, part[: len(rows)])  # an empty pass has a row of none


def take_rows(data: TensorDict, rows: list[int]) -> TensorDict:
    """The rows of a pass, taken without waiting for the device; an empty pass has one row of a
    single token, which no loss counts."""
    if rows:
        index = torch.tensor(rows)
        columns: Any = {
            name: data[name][without_waiting(index, data[name].device)]
            for name in data.keys()  # noqa: SIM118
        }
        return TensorDict(columns, batch_size=len(rows))
    blank = {
        name: torch.zeros(1, *column.shape[1:], dtype=column.dtype, device=column.device)
        for name, column in data.items()
    }
    blank["attention_mask"][:, 0] = 1
    return TensorDict(blank, batch_size=1)

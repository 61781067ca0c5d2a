"""Training on one device: the Hugging Face module itself, its weights stored once.

Nothing is wrapped or sharded, so parameters keep their addresses for the life of the process and
the built-in rollout engine generates with the very same storage.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from transformers import PreTrainedModel

from verl.config.optimizer import FSDPOptimizerConfig
from verl.models.forward import hidden_states, packed_layout
from verl.models.head import OutputHead, sum_squared_probs, token_log_probs
from verl.models.value import score_head
from verl.workers.engine.base import BaseEngine, Columns, LossFunction, MicroBatching, TrainResult
from verl.workers.engine.micro_batch import cut_by_count, cut_by_tokens
from verl.workers.engine.optimizer import MasterOptimizer, StepResult
from verl.workers.engine.packing import PackedRows, pack_rows

ROW_COLUMNS = ("input_ids", "attention_mask", "position_ids", "responses")


class OneDeviceEngine(BaseEngine):
    """A causal language model or a value model on one device."""

    def __init__(
        self,
        build_model: Callable[[], PreTrainedModel],
        optimizer_config: FSDPOptimizerConfig | None = None,
        *,
        max_grad_norm: float = 1.0,
        is_value_model: bool = False,
        gradient_checkpointing: bool = False,
    ) -> None:
        self._build_model = build_model
        self._optimizer_config = optimizer_config
        self._max_grad_norm = max_grad_norm
        self._is_value_model = is_value_model
        self._gradient_checkpointing = gradient_checkpointing

    def initialize(self) -> None:
        self.module = self._build_model()
        self.device = next(self.module.parameters()).device
        if self._gradient_checkpointing and self._optimizer_config is not None:
            self.module.gradient_checkpointing_enable({"use_reentrant": False})
        if self._optimizer_config is None:
            self.module.requires_grad_(False)
            self.optimizer = None
        else:
            self.optimizer = MasterOptimizer(self.module.named_parameters(), self._optimizer_config)

    @torch.no_grad()
    def infer_batch(
        self,
        data: TensorDict,
        *,
        micro_batching: MicroBatching,
        temperature: float = 1.0,
        with_sum_pi_squared: bool = False,
    ) -> Columns:
        self.module.eval()
        columns: Columns = {}
        for rows in self._schedule(data, micro_batching):
            for name, part in self._forward(data[rows], temperature, with_sum_pi_squared).items():
                whole = columns.setdefault(name, part.new_zeros(len(data), part.shape[1]))
                whole[rows] = part
        return columns

    def train_batch(
        self,
        data: TensorDict,
        loss_function: LossFunction,
        *,
        micro_batching: MicroBatching,
        temperature: float = 1.0,
    ) -> TrainResult:
        self._require_optimizer().zero_grad()
        self.module.train()  # for gradient checkpointing; dropout is 0 everywhere
        total_loss, metrics = 0.0, []
        schedule = self._schedule(data, micro_batching)
        for rows in schedule:
            micro_batch = data[rows]
            loss, report = loss_function(self._forward(micro_batch, temperature), micro_batch)
            loss.backward()
            total_loss += float(loss.detach())
            metrics.append(report)
        self.module.eval()
        step = self._optimizer_step()
        return TrainResult(
            loss=total_loss,
            grad_norm=step.grad_norm,
            learning_rate=self._require_optimizer().learning_rate,
            is_applied=step.is_applied,
            num_micro_batches=len(schedule),
            metrics=metrics,
        )

    def lr_scheduler_step(self) -> None:
        self._require_optimizer().schedule.step()

    def get_per_tensor_param(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.module.named_parameters()  # tied weights appear once

    def to(self, device: str, *, model: bool = True, optimizer: bool = True) -> None:
        if torch.device(device).type != self.device.type:
            raise ValueError(
                f"this engine shares its weights with the rollout engine and stays on "
                f"{self.device}; offloading to {device} needs the sharded engine"
            )

    def state_dict(self) -> dict[str, Any]:
        return {
            "policy_version": self.policy_version,
            "optimizer": self._require_optimizer().state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._require_optimizer().load_state_dict(state["optimizer"])
        self.policy_version = int(state["policy_version"])

    def disable_adapter(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _schedule(self, data: TensorDict, micro_batching: MicroBatching) -> list[list[int]]:
        if micro_batching.rows is not None:
            return cut_by_count(len(data), micro_batching.rows)
        assert micro_batching.tokens is not None
        lengths = data["attention_mask"].sum(1).tolist()
        return cut_by_tokens(lengths, micro_batching.tokens)

    def _forward(
        self, rows: TensorDict, temperature: float, with_sum_pi_squared: bool = False
    ) -> Columns:
        ids, mask, positions, responses = (rows[name].to(self.device) for name in ROW_COLUMNS)
        packed = pack_rows(ids, mask, positions, responses.shape[1])
        layout = packed_layout(self.module, packed.lengths)
        hidden = hidden_states(self.module, packed.input_ids, packed.position_ids, layout)
        if self._is_value_model:
            return {"values": packed.unpack(self._values(hidden, packed))}
        head, sources = OutputHead.of(self.module), hidden[packed.sources]
        log_probs, entropy = token_log_probs(sources, head, packed.targets, temperature=temperature)
        columns = {"log_probs": log_probs, "entropy": entropy}
        if with_sum_pi_squared:
            columns["sum_pi_squared"] = sum_squared_probs(sources, head, temperature=temperature)
        return {name: packed.unpack(values) for name, values in columns.items()}

    def _values(self, hidden: Tensor, packed: PackedRows) -> Tensor:
        return score_head(self.module)(hidden[packed.sources]).squeeze(-1).float()

    def _optimizer_step(self) -> StepResult:
        optimizer = self._require_optimizer()
        result = optimizer.step(self._max_grad_norm)
        self.policy_version += result.is_applied
        return result

    def _require_optimizer(self) -> MasterOptimizer:
        if self.optimizer is None:
            raise ValueError("this engine was built without an optimizer and only runs forward")
        return self.optimizer

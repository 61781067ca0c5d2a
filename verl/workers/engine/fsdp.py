"""Training on several ranks, each of which holds a part of every weight.

    each decoder layer is a unit:   gather its weights - compute - give them back
    backward, from the last layer:  gather - compute - sum the gradients, a part for each rank

This is torch's FSDP2 (`fully_shard`): parameters are DTensors, cut along their first dimension.
With `fsdp_size` below the number of ranks there are several copies of the weights, each divided
among `fsdp_size` ranks. Ranks meet inside every pass, so all must make equally many: the passes
come from a plan for all of them (`verl.workers.schedule`). Embedding, last norm and output layer
belong to the unit of the whole forward pass, so tied weights stay one.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from verl.config.engine import FSDPEngineConfig
from verl.config.optimizer import FSDPOptimizerConfig
from verl.models.lora import hf_weights
from verl.utils.checkpoint.pieces import Part
from verl.workers.engine.base import Columns, LossFunction, MicroBatching
from verl.workers.engine.loss_scale import LossScale
from verl.workers.engine.optimizer import MasterOptimizer
from verl.workers.engine.ranks import RanksEngine, clip_over_ranks, refuse_shape_dependent
from verl.workers.engine.units import (
    as_dtensor,
    fill_from_first_rank,
    local_part,
    refuse_options,
    shard,
    shard_mesh,
)
from verl.workers.schedule import Passes


class FSDPEngine(RanksEngine):
    """One of several ranks that hold a part of the model each."""

    meets_others_in_a_pass = True

    def __init__(
        self,
        build_model: Callable[[], PreTrainedModel],
        optimizer_config: FSDPOptimizerConfig | None = None,
        *,
        build_skeleton: Callable[[], PreTrainedModel],
        config: FSDPEngineConfig,
        compute_dtype: torch.dtype,
        device: torch.device | str,
        **options: Any,
    ) -> None:
        """`build_model` loads the weights into CPU memory; only the first rank calls it.

        `build_skeleton` makes the same model on the meta device, without weights.
        """
        super().__init__(build_model, optimizer_config, **options)
        self._build_skeleton = build_skeleton
        self._config = config
        self._compute_dtype = compute_dtype
        self._compute_device = torch.device(device)
        self._num_passes_left = 0

    def initialize(self) -> None:
        refuse_options(self._config, activation_offload=self._memory.activation_offload)
        load, self._build_model = self._build_model, self._build_sharded_model
        self._load_whole_model = load
        super().initialize()
        self.device = self._compute_device  # the weights may be in CPU memory

    def infer_batch(
        self,
        data: TensorDict,
        *,
        micro_batching: MicroBatching | Passes,
        temperature: float = 1.0,
        with_sum_pi_squared: bool = False,
    ) -> Columns:
        columns = super().infer_batch(
            data,
            micro_batching=micro_batching,
            temperature=temperature,
            with_sum_pi_squared=with_sum_pi_squared,
        )
        self._give_weights_back()
        return columns

    @torch.no_grad()
    def get_per_tensor_param(self) -> Iterator[tuple[str, Tensor]]:
        """Whole weights in the dtype they compute in, one at a time; every rank must take part."""
        whole = (
            (name, as_dtensor(weight.to(self._compute_device, self._compute_dtype)).full_tensor())
            for name, weight in self.module.named_parameters()
        )
        yield from hf_weights(self.module, whole)

    def _build_sharded_model(self) -> PreTrainedModel:
        source = self._load_whole_model() if dist.get_rank(self.group) == 0 else None
        module = self._build_skeleton()
        self._root = ForwardPass(module, super()._forward)
        self._mesh = shard_mesh(self.group, self._config.fsdp_size, self._compute_device.type)
        self._units = shard(self._root, module, self._mesh, self._config, self._compute_dtype)
        home = "cpu" if self._keeps_weights_on_cpu else self._compute_device
        self._root.to_empty(device=home)
        fill_from_first_rank(module, source, self.group, self._compute_device)
        return module

    def _build_optimizer(self, config: FSDPOptimizerConfig) -> MasterOptimizer:
        optimizer = ShardedOptimizer(
            self.module.named_parameters(),
            config,
            shard_group=self._mesh.get_group(self._mesh.ndim - 1),
            offload=self._memory.optimizer_offload,
        )
        if self._compute_dtype == torch.float16:  # whatever the weights are stored in
            optimizer.loss_scale = LossScale()
        return optimizer

    def _schedule(
        self, data: TensorDict, lengths: list[int], micro_batching: MicroBatching | Passes
    ) -> Passes:
        if isinstance(micro_batching, MicroBatching) and self.get_data_parallel_size() > 1:
            raise ValueError(
                "ranks that share every weight must make equally many passes, which none can know "
                f"alone; give the passes of a plan for all ranks instead of {micro_batching} "
                "(verl.workers.schedule)"
            )
        return super()._schedule(data, lengths, micro_batching)

    def _training_schedule(
        self, data: TensorDict, lengths: list[int], micro_batching: MicroBatching | Passes
    ) -> Passes:
        schedule = super()._training_schedule(data, lengths, micro_batching)
        self._num_passes_left = len(schedule)
        return schedule

    def _train_pass(
        self, micro_batch: TensorDict, loss_function: LossFunction, temperature: float
    ) -> tuple[Tensor, dict[str, Any]]:
        """Whoever keeps whole weights between passes can keep whole gradients too, and sum once."""
        self._num_passes_left -= 1
        is_last = self._num_passes_left == 0
        self._root_unit.set_requires_gradient_sync(is_last or self._config.reshard_after_forward)
        self._root_unit.set_is_last_backward(is_last)
        result = super()._train_pass(micro_batch, loss_function, temperature)
        if is_last:
            self._give_weights_back()
        return result

    def _forward(
        self, rows: TensorDict, temperature: float, with_sum_pi_squared: bool = False
    ) -> Columns:
        return self._root(rows, temperature, with_sum_pi_squared)

    @property
    def _root_unit(self) -> FSDPModule:
        return self._units[-1]

    @property
    def _keeps_weights_on_cpu(self) -> bool:
        return self._config.offload_policy or self._config.param_offload

    def _give_weights_back(self) -> None:
        """Outside of passes the model has its divided weights, not gathered ones."""
        for unit in self._units:
            unit.reshard()


class ForwardPass(nn.Module):
    """From rows to columns as the forward of one module, for whose length weights are gathered."""

    def __init__(self, module: PreTrainedModel, run: Callable[..., Columns]) -> None:
        super().__init__()
        self.module = module
        self._run = run

    def forward(self, *arguments: Any) -> Columns:
        # Copies: a hook that gathers weights for the backward pass would be lost on a view.
        return {name: column.clone() for name, column in self._run(*arguments).items()}


class ShardedOptimizer(MasterOptimizer):
    """Steps on this rank's parts of the weights; where these are fp32, in place."""

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        config: FSDPOptimizerConfig,
        *,
        shard_group: dist.ProcessGroup,
        offload: bool = False,
    ) -> None:
        refuse_shape_dependent(config)
        self._shard_group = shard_group
        super().__init__(parameters, config, offload=offload)

    def _master_of(self, parameter: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(local_part(parameter).float())  # the same storage if it is fp32

    def _separate_masters(self) -> list[nn.Parameter]:
        return [self.masters[name] for name, p in self.parameters.items() if not is_fp32(p)]

    def _move_gradients_to_masters(self) -> None:
        for name, parameter in self.parameters.items():
            master = self.masters[name]
            if is_fp32(parameter):
                master.data = local_part(parameter)  # torch may have moved it, to pad or to pin it
            if parameter.grad is None:
                master.grad = torch.zeros_like(master)
            else:
                master.grad = local_part(parameter.grad).to(master)
                parameter.grad = None

    def _clip_gradients(self, max_norm: float) -> float:
        return clip_over_ranks(self.masters.values(), max_norm, self._shard_group)

    def _write_back(self) -> None:
        for name, parameter in self.parameters.items():
            if not is_fp32(parameter):
                local_part(parameter).copy_(self.masters[name])
        self._num_writes = self._count_writes()

    def _follow_others_writes(self) -> None:
        for name, count in self._count_writes().items():
            parameter = self.parameters[name]
            if count != self._num_writes[name] and not is_fp32(parameter):
                self.masters[name].copy_(local_part(parameter))

    def _as_part(self, name: str, tensor: Tensor) -> Part:
        parameter = as_dtensor(self.parameters[name])
        return DTensor.from_local(
            tensor.detach(),
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )


def is_fp32(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32

"""Training on several ranks, each of which holds a shard of every weight.

    each decoder layer is a unit:   gather its weights - compute - free them
    backward, from the last layer:  gather - compute - reduce-scatter the gradients

This is torch's FSDP2 (`fully_shard`): parameters are DTensors, sharded along their first dimension.
With `fsdp_size` below the number of ranks there are several copies of the weights, each sharded
over `fsdp_size` ranks. Ranks meet inside every pass, so all must run equally many micro-batches,
which come from a plan for all of them (`verl.workers.schedule`). Embedding, last norm and output
layer belong to the unit of the whole forward pass, so tied weights stay one.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from verl.config.engine import FSDPEngineConfig
from verl.config.optimizer import FSDPOptimizerConfig
from verl.models.head import OutputHead
from verl.models.lora import hf_weights
from verl.models.vision import vision_parts
from verl.utils.checkpoint.pieces import Part
from verl.workers.engine.base import Columns
from verl.workers.engine.optimizer import LossScale, MasterOptimizer
from verl.workers.engine.outputs import LOG_PROBS, Outputs
from verl.workers.engine.registry import MODEL_TYPES, EngineRegistry
from verl.workers.engine.sharding import (
    RankGroups,
    as_dtensor,
    clip_over_ranks,
    fill_from_first_rank,
    local_shard,
    refuse_options,
    refuse_shape_dependent,
    shard,
    shard_mesh,
)
from verl.workers.engine.spec import EngineSpec, compute_dtype
from verl.workers.engine.stepping import SteppingEngine
from verl.workers.schedule import MicroBatching, Passes


@EngineRegistry.register(model_type=MODEL_TYPES, backend=("fsdp", "fsdp2"))
class FSDPEngine(SteppingEngine):
    """One of several ranks that hold a shard of the model each."""

    has_collectives_in_forward = True
    is_sharded = True
    sums_in_fp32 = True

    def __init__(
        self,
        build_model: Callable[[], PreTrainedModel],
        optimizer_config: FSDPOptimizerConfig | None = None,
        *,
        build_skeleton: Callable[[], PreTrainedModel],
        config: FSDPEngineConfig,
        compute_dtype: torch.dtype,
        device: torch.device | str,
        group: dist.ProcessGroup | None = None,
        sequence_group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        """`build_model` loads the weights into CPU memory; only the first rank calls it.

        `build_skeleton` makes the same model on the meta device, without weights.
        """
        ranks = RankGroups(group, sequence_group)
        super().__init__(build_model, optimizer_config, ranks=ranks, **options)
        refuse_options(config, activation_offload=self.memory.activation_offload)
        self._build_skeleton = build_skeleton
        self._config = config
        self._compute_dtype = compute_dtype
        self._compute_device = torch.device(device)  # the weights may be in CPU memory
        self._group = ranks.all

    @classmethod
    def from_spec(cls, spec: EngineSpec) -> "FSDPEngine":
        config, dtype = spec.engine, spec.dtype
        if spec.optimizer is not None:  # what is trained is its own fp32 master
            dtype = compute_dtype(config.model_dtype, spec.device)
        return cls(
            partial(spec.load_module, dtype, "cpu"),
            spec.optimizer,
            build_skeleton=partial(spec.load_module, dtype, "meta"),
            config=config,
            compute_dtype=compute_dtype(config.mixed_precision.param_dtype, spec.device),
            device=spec.device,
            memory=spec.memory(whole_weights=False),
            group=spec.group,
            sequence_group=spec.sequence_group,
            **spec.options(),
        )

    def load_module(self) -> PreTrainedModel:
        assert self._compute_device is not None
        source = self._build_model() if dist.get_rank(self._group) == 0 else None
        module = self._build_skeleton()
        self._root = ForwardPass(module, super().forward)
        self._mesh = shard_mesh(self._group, self._config.fsdp_size, self._compute_device.type)
        self._units = shard(self._root, module, self._mesh, self._config, self._compute_dtype)
        is_on_cpu = self._config.offload_policy or self._config.param_offload
        self._root.to_empty(device="cpu" if is_on_cpu else self._compute_device)
        fill_from_first_rank(module, source, self._group, self._compute_device)
        return module

    def build_optimizer(self, config: FSDPOptimizerConfig) -> MasterOptimizer:
        optimizer = ShardedOptimizer(
            self.module.named_parameters(),
            config,
            shard_group=self._mesh.get_group(self._mesh.ndim - 1),
            offload=self.memory.optimizer_offload,
        )
        if self._compute_dtype == torch.float16:  # whatever the weights are stored in
            optimizer.loss_scale = LossScale()
        return optimizer

    def schedule(
        self, data: TensorDict, lengths: list[int], micro_batching: MicroBatching | Passes
    ) -> Passes:
        if isinstance(micro_batching, MicroBatching) and self.get_data_parallel_size() > 1:
            raise ValueError(
                "ranks that shard every weight must run equally many micro-batches, which none can "
                "know alone; give the passes of a plan for all ranks instead of "
                f"{micro_batching} (verl.workers.schedule)"
            )
        return super().schedule(data, lengths, micro_batching)

    def forward(
        self, rows: TensorDict, temperature: float, outputs: Outputs = LOG_PROBS
    ) -> Columns:
        return self._root(rows, temperature, outputs)

    @torch.no_grad()
    def output_head(self) -> OutputHead:
        """Gathered for the caller, in the dtype it computes in; a copy for each call."""
        head = OutputHead.of(self.module)
        bias = None if head.bias is None else self._whole(head.bias)
        return replace(head, weight=self._whole(head.weight), bias=bias)

    def _whole(self, weight: Tensor) -> Tensor:
        """A copy: gathered weights are freed behind the caller's back."""
        weight = weight.detach().to(self.device, self._compute_dtype, copy=True)
        return weight.full_tensor() if isinstance(weight, DTensor) else weight

    def begin_micro_batch(self, *, is_last: bool) -> None:
        """A rank that keeps whole weights between micro-batches can keep whole gradients too, and
        sum once."""
        root = self._units[-1]
        root.set_requires_gradient_sync(is_last or self._config.reshard_after_forward)
        root.set_is_last_backward(is_last)

    def end_passes(self) -> None:
        """Outside of passes the module has its sharded weights, not gathered ones."""
        for unit in self._units:
            unit.reshard()

    @torch.no_grad()
    def get_per_tensor_param(self) -> Iterator[tuple[str, Tensor]]:
        """Whole weights in the dtype they compute in, one at a time; every rank must take part."""
        whole = (
            (name, as_dtensor(weight.to(self.device, self._compute_dtype)).full_tensor())
            for name, weight in self.module.named_parameters()
        )
        yield from hf_weights(self.module, whole)


class ForwardPass(nn.Module):
    """The forward pass of a micro-batch as that of one module, which FSDP gathers weights for."""

    def __init__(self, module: PreTrainedModel, run: Callable[..., Columns]) -> None:
        super().__init__()
        self.module = module
        self._run = run

    def forward(self, *arguments: Any) -> Columns:
        # Copies: a hook that gathers weights for the backward pass would be lost on a view.
        unseen = self._nothing_of_the_tower()
        return {name: column + unseen for name, column in self._run(*arguments).items()}

    def _nothing_of_the_tower(self) -> Tensor | float:
        """0, with a gradient of 0 for the trained weights of a vision tower: ranks sum gradients of
        the same weights, also where their rows have no images."""
        towers = vision_parts(self.module) if torch.is_grad_enabled() else []
        weights = [p for tower in towers for p in tower.parameters() if p.requires_grad]
        return sum((weight.sum() * 0.0 for weight in weights), 0.0)


class ShardedOptimizer(MasterOptimizer):
    """Steps on this rank's shards of the weights; where these are fp32, in place."""

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
        return nn.Parameter(local_shard(parameter).float())  # the same storage if it is fp32

    def _separate_masters(self) -> list[nn.Parameter]:
        return [self.masters[name] for name, p in self.parameters.items() if not is_fp32(p)]

    def _move_gradients_to_masters(self) -> None:
        for name, parameter in self.parameters.items():
            master = self.masters[name]
            if is_fp32(parameter):
                master.data = local_shard(parameter)  # torch may have moved it, to pad or to pin it
            if parameter.grad is None:
                master.grad = torch.zeros_like(master)
            else:
                master.grad = local_shard(parameter.grad).to(master)
                parameter.grad = None

    def _clip_gradients(self, max_norm: float) -> float:
        return clip_over_ranks(self.masters.values(), max_norm, self._shard_group)

    def _write_back(self) -> None:
        for name, parameter in self.parameters.items():
            if not is_fp32(parameter):
                local_shard(parameter).copy_(self.masters[name])
        self._num_writes = self._count_writes()

    def _follow_others_writes(self) -> None:
        for name, count in self._count_writes().items():
            parameter = self.parameters[name]
            if count != self._num_writes[name] and not is_fp32(parameter):
                self.masters[name].copy_(local_shard(parameter))

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

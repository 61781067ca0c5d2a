"""Training on several ranks, each with the whole model and a shard of the optimizer's state.

    rank 0   rows 0, 2, ..   gradient g0 ┐ sum of a bucket,   step on slice 0 ┐ gather the
                                         ├ a slice for each                   ├ new weights
    rank 1   rows 1, 3, ..   gradient g1 ┘ rank, in fp32      step on slice 1 ┘ in place

Weights keep their addresses, so a rollout engine may share them. Masters and moments, most of the
memory, are sharded (ZeRO stage 1, arXiv:1910.02054): each parameter is flattened and cut into equal
slices, one per rank. An optimizer therefore sees vectors; one that looks at the shape of a matrix
is refused. Nothing is exchanged inside a pass, so each rank may run as many micro-batches as it
likes. `ReplicatedEngine` keeps the whole state on every rank.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from verl.config.optimizer import FSDPOptimizerConfig
from verl.utils.checkpoint.pieces import FlatSlice, Part
from verl.utils.distributed import all_reduce_
from verl.workers.engine.optimizer import MasterOptimizer
from verl.workers.engine.registry import MODEL_TYPES, EngineRegistry
from verl.workers.engine.sharding import (
    RankGroups,
    as_on_first_rank,
    clip_over_ranks,
    in_buckets,
    refuse_shape_dependent,
)
from verl.workers.engine.spec import EngineSpec
from verl.workers.engine.stepping import SteppingEngine


class WholeModelEngine(SteppingEngine):
    """One of several ranks that hold the whole model each; all start with the first rank's."""

    def __init__(
        self,
        *arguments: Any,
        group: dist.ProcessGroup | None = None,
        sequence_group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        """`group` has all ranks that train this model, `sequence_group` those that split the tokens
        of the same rows (`RankGroups`)."""
        super().__init__(*arguments, ranks=RankGroups(group, sequence_group), **options)

    @classmethod
    def from_spec(cls, spec: EngineSpec) -> "WholeModelEngine":
        return cls(
            partial(spec.load_module, spec.dtype, spec.device),
            spec.optimizer,
            memory=spec.memory(whole_weights=True),
            group=spec.group,
            sequence_group=spec.sequence_group,
            **spec.options(),
        )

    def load_module(self) -> PreTrainedModel:
        assert self.ranks is not None
        return as_on_first_rank(self._build_model, self.ranks.all)


@EngineRegistry.register(model_type=MODEL_TYPES, backend="zero1")
class Zero1Engine(WholeModelEngine):
    """Ranks that shard the optimizer's state."""

    def build_optimizer(self, config: FSDPOptimizerConfig) -> MasterOptimizer:
        assert self.ranks is not None
        return SlicedOptimizer(
            self.module.named_parameters(),
            config,
            group=self.ranks.all,
            offload=self.memory.optimizer_offload,
        )


@EngineRegistry.register(model_type=MODEL_TYPES, backend="replicated")
class ReplicatedEngine(WholeModelEngine):
    """Ranks that all keep the whole optimizer's state and make the same step.

    All ranks are equal, so any of them can write a checkpoint that a single rank could have
    written.
    """

    def build_optimizer(self, config: FSDPOptimizerConfig) -> MasterOptimizer:
        assert self.ranks is not None
        return SummingOptimizer(
            self.module.named_parameters(),
            config,
            group=self.ranks.all,
            offload=self.memory.optimizer_offload,
        )


class SummingOptimizer(MasterOptimizer):
    """Masters are whole, and equal on all ranks, because gradients are summed over them."""

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        config: FSDPOptimizerConfig,
        *,
        group: dist.ProcessGroup,
        offload: bool = False,
    ) -> None:
        self._group = group
        super().__init__(parameters, config, offload=offload)

    def _move_gradients_to_masters(self) -> None:
        sum_gradients(self.parameters, self._group)
        super()._move_gradients_to_masters()


class SlicedOptimizer(MasterOptimizer):
    """Masters are this rank's slices; gradients and new weights travel between ranks."""

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        config: FSDPOptimizerConfig,
        *,
        group: dist.ProcessGroup,
        offload: bool = False,
    ) -> None:
        refuse_shape_dependent(config)
        self._slices = Slices(group)
        super().__init__(parameters, config, offload=offload)

    def _as_part(self, name: str, tensor: Tensor) -> Part:
        parameter = self.parameters[name]
        start = self._slices.start(parameter)
        return FlatSlice(tensor=tensor, shape=tuple(parameter.shape), start=start)

    def _master_of(self, parameter: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(self._slices.own(parameter.detach()).float().clone())

    def _move_gradients_to_masters(self) -> None:
        """Each master gets its slice of the sum over ranks, in fp32; a missing gradient is 0.

        A gradient that is not finite on one rank makes the norm so on all, and all leave the step
        out.
        """
        for names in in_buckets(self.parameters):
            gradients = take_gradients([self.parameters[name] for name in names])
            for name, piece in zip(names, self._slices.sum(gradients), strict=True):
                self.masters[name].grad = piece

    def _clip_gradients(self, max_norm: float) -> float:
        return clip_over_ranks(self.masters.values(), max_norm, self._slices.group)

    def _write_back(self) -> None:
        for names in in_buckets(self.parameters):
            parameters = [self.parameters[name] for name in names]
            self._slices.gather([self.masters[name].detach() for name in names], parameters)
        self._num_writes = self._count_writes()

    def _follow_others_writes(self) -> None:
        for name, count in self._count_writes().items():
            if count != self._num_writes[name]:
                self.masters[name].copy_(self._slices.own(self.parameters[name]))


class Slices:
    """Flattened tensors that are cut into equal slices, one for each rank of a group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)

    def own(self, tensor: Tensor) -> Tensor:
        size = self._size(tensor)
        return tensor.reshape(-1)[self.rank * size : (self.rank + 1) * size]

    def start(self, tensor: Tensor) -> int:
        """The first element of this rank's slice."""
        return min(self.rank * self._size(tensor), tensor.numel())

    def sum(self, tensors: list[Tensor]) -> list[Tensor]:
        """This rank's slices of the sums over ranks, in fp32."""
        sums = self._sum_and_scatter(self._as_table(tensors, torch.float32))
        pieces = sums.split([self._size(tensor) for tensor in tensors])
        return [
            piece[: len(self.own(tensor))].clone()
            for piece, tensor in zip(pieces, tensors, strict=True)
        ]

    def gather(self, slices: list[Tensor], tensors: Sequence[Tensor]) -> None:
        """Fill the tensors, all of one dtype, from the slices of all ranks."""
        sizes = [self._size(tensor) for tensor in tensors]
        mine = torch.cat(
            [F.pad(own, (0, size - len(own))) for own, size in zip(slices, sizes, strict=True)]
        ).to(tensors[0].dtype)
        for tensor, columns in zip(tensors, self._table(mine).split(sizes, dim=1), strict=True):
            tensor.copy_(columns.reshape(-1)[: tensor.numel()].view_as(tensor))

    def _size(self, tensor: Tensor) -> int:
        """Elements of a slice; the last ranks may have fewer."""
        return -(-tensor.numel() // self.num_ranks)

    def _as_table(self, tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
        """(ranks, elements): row r is the slices of rank r, filled up with zeros."""
        rows = []
        for tensor in tensors:
            missing = self._size(tensor) * self.num_ranks - tensor.numel()
            rows.append(F.pad(tensor.reshape(-1).to(dtype), (0, missing)).view(self.num_ranks, -1))
        return torch.cat(rows, dim=1)

    def _sum_and_scatter(self, table: Tensor) -> Tensor:
        """This rank's row of the sum over ranks."""
        if table.device.type == "cpu":  # gloo
            return all_reduce_(table, group=self.group)[self.rank]
        row = torch.empty_like(table[0])
        dist.reduce_scatter_tensor(row, table, group=self.group)
        return row

    def _table(self, row: Tensor) -> Tensor:
        """The rows of all ranks."""
        table = row.new_empty(self.num_ranks, row.numel())
        if table.device.type == "cpu":  # gloo
            dist.all_gather(list(table.unbind(0)), row, group=self.group)
        else:
            dist.all_gather_into_tensor(table.view(-1), row, group=self.group)
        return table


def take_gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """The gradients, which the parameters give up; one that is missing is 0."""
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    return gradients


@torch.no_grad()
def sum_gradients(parameters: Mapping[str, nn.Parameter], group: dist.ProcessGroup) -> None:
    """Replace every gradient by its sum over the ranks, in fp32; one that is missing counts as 0.

    A gradient that is not finite on one rank is so on all, and all leave the step out.
    """
    for names in in_buckets(parameters):
        bucket = [parameters[name] for name in names]
        flat = torch.cat([gradient.reshape(-1).float() for gradient in take_gradients(bucket)])
        summed = all_reduce_(flat, group=group).split([p.numel() for p in bucket])
        for parameter, gradient in zip(bucket, summed, strict=True):
            parameter.grad = gradient.view_as(parameter).to(parameter.dtype)

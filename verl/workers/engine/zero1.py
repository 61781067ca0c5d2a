"""Training on several ranks, each with the whole model and a part of the optimizer's state.

    rank 0   rows 0, 2, ..   gradient g0 ┐ sum of a bucket,   step on slice 0 ┐ gather the
                                         ├ a slice for each                   ├ new weights
    rank 1   rows 1, 3, ..   gradient g1 ┘ rank, in fp32      step on slice 1 ┘ in place

Weights keep their addresses, so a rollout engine may share them. Masters and moments, most of the
memory, are divided (ZeRO stage 1, arXiv:1910.02054): each parameter is flattened and cut into equal
slices, one per rank. An optimizer therefore sees vectors; one that looks at the shape of a matrix
is refused. Nothing is exchanged inside a pass.
"""

from collections.abc import Iterable
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from verl.config.optimizer import FSDPOptimizerConfig
from verl.utils.checkpoint.pieces import FlatSlice, Part
from verl.utils.distributed import all_reduce_
from verl.workers.engine.optimizer import MasterOptimizer
from verl.workers.engine.ranks import (
    RanksEngine,
    as_on_first_rank,
    clip_over_ranks,
    in_buckets,
    refuse_shape_dependent,
)


class Zero1Engine(RanksEngine):
    """One of several ranks with a replica of the model each."""

    def initialize(self) -> None:
        # Before the optimizer copies them: its masters must be those of the first rank too.
        self._build_model = partial(as_on_first_rank, self._build_model, self.group)
        super().initialize()

    def _build_optimizer(self, config: FSDPOptimizerConfig) -> MasterOptimizer:
        return SlicedOptimizer(
            self.module.named_parameters(),
            config,
            group=self.group,
            offload=self._memory.optimizer_offload,
        )


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
        self._group = group
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        super().__init__(parameters, config, offload=offload)

    def _as_part(self, name: str, tensor: Tensor) -> Part:
        parameter = self.parameters[name]
        start = min(self._rank * self._slice_size(parameter), parameter.numel())
        return FlatSlice(tensor=tensor, shape=tuple(parameter.shape), start=start)

    def _master_of(self, parameter: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(self._slice(parameter.detach()).float().clone())

    def _move_gradients_to_masters(self) -> None:
        """Each master gets its slice of the sum over ranks, in fp32; a missing gradient is 0.

        A gradient that is not finite on one rank makes the norm so on all, and all leave the step
        out.
        """
        for names in in_buckets(self.parameters):
            parameters = [self.parameters[name] for name in names]
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            for parameter in parameters:
                parameter.grad = None
            slices = self._sum_and_scatter(self._as_table(gradients, torch.float32))
            sizes = [self._slice_size(parameter) for parameter in parameters]
            for name, piece in zip(names, slices.split(sizes), strict=True):
                master = self.masters[name]
                master.grad = piece[: master.numel()].clone()

    def _clip_gradients(self, max_norm: float) -> float:
        return clip_over_ranks(self.masters.values(), max_norm, self._group)

    def _write_back(self) -> None:
        for names in in_buckets(self.parameters):
            parameters = [self.parameters[name] for name in names]
            sizes = [self._slice_size(parameter) for parameter in parameters]
            mine = torch.cat(
                [
                    F.pad(self.masters[name].detach(), (0, size - self.masters[name].numel()))
                    for name, size in zip(names, sizes, strict=True)
                ]
            ).to(parameters[0].dtype)
            table = self._gather(mine)
            for parameter, columns in zip(parameters, table.split(sizes, dim=1), strict=True):
                parameter.copy_(columns.reshape(-1)[: parameter.numel()].view_as(parameter))
        self._num_writes = self._count_writes()

    def _follow_others_writes(self) -> None:
        for name, count in self._count_writes().items():
            if count != self._num_writes[name]:
                self.masters[name].copy_(self._slice(self.parameters[name]))

    def _slice(self, tensor: Tensor) -> Tensor:
        size = self._slice_size(tensor)
        return tensor.reshape(-1)[self._rank * size : (self._rank + 1) * size]

    def _slice_size(self, tensor: Tensor) -> int:
        """Elements of a slice; the last ranks may have fewer."""
        return -(-tensor.numel() // self._size)

    def _as_table(self, tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
        """(ranks, elements): row r is the slices of rank r, filled up with zeros."""
        rows = []
        for tensor in tensors:
            missing = self._slice_size(tensor) * self._size - tensor.numel()
            rows.append(F.pad(tensor.reshape(-1).to(dtype), (0, missing)).view(self._size, -1))
        return torch.cat(rows, dim=1)

    def _sum_and_scatter(self, table: Tensor) -> Tensor:
        """This rank's row of the sum over ranks."""
        if table.device.type == "cpu":  # gloo
            return all_reduce_(table, group=self._group)[self._rank]
        row = torch.empty_like(table[0])
        dist.reduce_scatter_tensor(row, table, group=self._group)
        return row

    def _gather(self, row: Tensor) -> Tensor:
        """The rows of all ranks."""
        table = row.new_empty(self._size, row.numel())
        if table.device.type == "cpu":  # gloo
            dist.all_gather(list(table.unbind(0)), row, group=self._group)
        else:
            dist.all_gather_into_tensor(table.view(-1), row, group=self._group)
        return table

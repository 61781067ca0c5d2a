"""Training on several ranks, each of which holds the whole model and the whole optimizer.

    rank 0   rows 0, 2, 4, ...   gradient g0 ┐
                                             ├─ sum over ranks ─ the same step everywhere
    rank 1   rows 1, 3, 5, ...   gradient g1 ┘

All ranks are equal, so any of them can write a checkpoint that a single rank could have written.
Ranks exchange nothing but gradients, so each may cut its rows into as many micro-batches as it
likes.
"""

from collections.abc import Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from verl.utils.distributed import all_reduce_
from verl.workers.engine.optimizer import StepResult
from verl.workers.engine.ranks import RanksEngine, as_on_first_rank, in_buckets


class ReplicatedEngine(RanksEngine):
    """One of several equal ranks."""

    def initialize(self) -> None:
        # Before the optimizer copies them: its masters must be those of the first rank too.
        self._build_model = partial(as_on_first_rank, self._build_model, self.group)
        super().initialize()

    def _optimizer_step(self, gradient_factor: float) -> StepResult:
        sum_gradients(self._require_optimizer().parameters, self.group)
        return super()._optimizer_step(gradient_factor)


@torch.no_grad()
def sum_gradients(parameters: Mapping[str, nn.Parameter], group: dist.ProcessGroup) -> None:
    """Replace every gradient by its sum over the ranks, in fp32; one that is missing counts as 0.

    A gradient that is not finite on one rank is so on all, and all leave the step out.
    """
    for names in in_buckets(parameters):
        bucket = [parameters[name] for name in names]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        flat = torch.cat([gradient.reshape(-1).float() for gradient in gradients])
        summed = all_reduce_(flat, group=group).split([p.numel() for p in bucket])
        for parameter, gradient in zip(bucket, summed, strict=True):
            parameter.grad = gradient.view_as(parameter).to(parameter.dtype)

"""Training on several ranks, each of which holds the whole model.

    rank 0   rows 0, 2, 4, ...   gradient g0 ┐
                                             ├─ sum over ranks ─ the same step everywhere
    rank 1   rows 1, 3, 5, ...   gradient g1 ┘

A loss is divided by counts over all ranks before it gets here, so gradients are summed, never
averaged, and the step is the one a single rank would make on all rows. Ranks exchange nothing else,
so each may cut its rows into as many micro-batches as it likes. A rank that is gone or silent
raises an error on the others, at the latest after the process group's own time limit.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import nn
from transformers import PreTrainedModel

from verl.utils.collectives import all_reduce_, broadcast_dict_tensor
from verl.workers.engine.base import LossFunction, MicroBatching, TrainResult
from verl.workers.engine.one_device import OneDeviceEngine
from verl.workers.engine.optimizer import StepResult

BUCKET_ELEMENTS = 1 << 24
"""Gradients that travel together: 64 MiB in fp32."""


class ReplicatedEngine(OneDeviceEngine):
    """One of several equal ranks; the process group must exist before `initialize`."""

    def initialize(self) -> None:
        # Before the optimizer copies them: its masters must be those of rank 0 too.
        self._build_model = partial(as_on_rank_zero, self._build_model)
        super().initialize()

    def train_batch(
        self,
        data: TensorDict,
        loss_function: LossFunction,
        *,
        micro_batching: MicroBatching,
        temperature: float = 1.0,
    ) -> TrainResult:
        """One step on the rows of all ranks; `loss` is their sum, `metrics` are this rank's."""
        result = super().train_batch(
            data, loss_function, micro_batching=micro_batching, temperature=temperature
        )
        loss = all_reduce_(torch.tensor(result.loss, dtype=torch.float64))
        return replace(result, loss=float(loss))

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank()

    def get_data_parallel_size(self) -> int:
        return dist.get_world_size()

    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        return dist.group.WORLD

    def _optimizer_step(self) -> StepResult:
        sum_gradients(self._require_optimizer().parameters.values())
        return super()._optimizer_step()


def as_on_rank_zero(build_model: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    model = build_model()
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    broadcast_dict_tensor(weights, src=0, group=None)
    return model


@torch.no_grad()
def sum_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Replace every gradient by its sum over the ranks, in fp32; one that is missing counts as 0.

    A gradient that is not finite on one rank is so on all, and all leave the step out.
    """
    for bucket in in_buckets(parameters):
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        flat = torch.cat([gradient.reshape(-1).float() for gradient in gradients])
        summed = all_reduce_(flat).split([p.numel() for p in bucket])
        for parameter, gradient in zip(bucket, summed, strict=True):
            parameter.grad = gradient.view_as(parameter).to(parameter.dtype)


def in_buckets(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Consecutive parameters of about `BUCKET_ELEMENTS` together, in an order all ranks share."""
    bucket: list[nn.Parameter] = []
    num_elements = 0
    for parameter in parameters:
        bucket.append(parameter)
        num_elements += parameter.numel()
        if num_elements >= BUCKET_ELEMENTS:
            yield bucket
            bucket, num_elements = [], 0
    if bucket:
        yield bucket

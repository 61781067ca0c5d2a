"""What engines on several ranks have in common: who they are, and one loss for all.

    rank        0   1   2   3          gradients are summed over all of them
    sequence   (0   1) (2   3)         two ranks hold the same rows and divide their tokens
    data       (0       2)             one rank per share of the rows; so do (1 3)

A loss is divided by counts over all ranks before it gets here, so gradients are summed, never
averaged, and the step is the one a single rank would make on all rows. A rank that is gone or
silent raises an error on the others, at the latest after the process group's own time limit.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import nn
from transformers import PreTrainedModel

from verl.config.optimizer import FSDPOptimizerConfig
from verl.utils.distributed import all_reduce_, broadcast_dict_tensor
from verl.workers.engine.base import LossFunction, MicroBatching, TrainResult
from verl.workers.engine.one_device import OneDeviceEngine
from verl.workers.schedule import Passes

BUCKET_ELEMENTS = 1 << 24
"""Gradients that travel together: 64 MiB in fp32."""

LOOK_AT_SHAPES = ("Adafactor", "LBFGS", "Muon", "Shampoo", "SOAP")
"""Optimizers whose step on a matrix is not a step on each of its elements."""


class RanksEngine(OneDeviceEngine):
    """One of several ranks that train a model together; their process group must exist before."""

    def __init__(
        self,
        *arguments: Any,
        group: dist.ProcessGroup | None = None,
        sequence_group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        """`group` has all ranks that train this model; None is every rank of the job.

        The ranks of a `sequence_group` follow each other in `group`.
        """
        super().__init__(*arguments, **options)
        self.group = group or world_group()
        self.sequence_group = sequence_group
        self._data_group = self.group
        if sequence_group is not None:
            self._data_group = data_group(self.group, dist.get_world_size(sequence_group))

    def train_batch(
        self,
        data: TensorDict,
        loss_function: LossFunction,
        *,
        micro_batching: MicroBatching | Passes,
        temperature: float = 1.0,
    ) -> TrainResult:
        """One step on the rows of all ranks; `loss` is their sum, `metrics` are this rank's.

        Passes that were split for want of memory are counted over all ranks too.
        """
        result = super().train_batch(
            data, loss_function, micro_batching=micro_batching, temperature=temperature
        )
        sums = torch.tensor([result.loss, result.num_oom_splits], dtype=torch.float64)
        loss, num_oom_splits = all_reduce_(sums, group=self._data_group).tolist()
        return replace(result, loss=loss, num_oom_splits=int(num_oom_splits))

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(self._data_group)

    def get_data_parallel_size(self) -> int:
        return dist.get_world_size(self._data_group)

    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        return self._data_group

    def is_mp_src_rank_with_outputs(self) -> bool:
        return self.sequence_group is None or dist.get_rank(self.sequence_group) == 0


def world_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    if group is None:
        raise ValueError(
            "an engine on several ranks needs the process group that they share; call "
            "verl.utils.distributed.initialize_global_process_group first"
        )
    return group


def data_group(group: dist.ProcessGroup, ranks_per_sequence: int) -> dist.ProcessGroup:
    """The ranks of `group` that have this one's place in their sequence groups."""
    ranks: Sequence[int] = dist.get_process_group_ranks(group)
    peers = list(ranks[dist.get_rank(group) % ranks_per_sequence :: ranks_per_sequence])
    made = dist.new_group(peers, use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup), "this rank is among its peers"
    return made


def as_on_first_rank(
    build_model: Callable[[], PreTrainedModel], group: dist.ProcessGroup
) -> PreTrainedModel:
    """The model that `build_model` makes, with the first rank's weights on all."""
    model = build_model()
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    broadcast_dict_tensor(weights, src=dist.get_global_rank(group, 0), group=group)
    return model


def in_buckets(parameters: Mapping[str, nn.Parameter]) -> Iterator[list[str]]:
    """Names of consecutive parameters of one dtype that travel together, in the same order on all
    ranks: as many as reach `BUCKET_ELEMENTS`."""
    names: list[str] = []
    num_elements = 0
    for name, parameter in parameters.items():
        is_other_dtype = bool(names) and parameter.dtype != parameters[names[0]].dtype
        if num_elements >= BUCKET_ELEMENTS or is_other_dtype:
            yield names
            names, num_elements = [], 0
        names.append(name)
        num_elements += parameter.numel()
    if names:
        yield names


def refuse_shape_dependent(config: FSDPOptimizerConfig) -> None:
    if config.optimizer in LOOK_AT_SHAPES:
        raise ValueError(
            f"optim.optimizer is {config.optimizer}, which looks at whole matrices, but ranks "
            "that divide the optimizer's state hold parts of them; use AdamW or another "
            "element-wise optimizer"
        )


def clip_over_ranks(
    masters: Iterable[nn.Parameter], max_norm: float, group: dist.ProcessGroup
) -> float:
    """The norm of a gradient whose parts are on the ranks of `group`; above `max_norm` every part
    is scaled down."""
    masters = list(masters)
    gradients = [master.grad for master in masters if master.grad is not None]
    square = torch.nn.utils.get_total_norm(gradients).double().square()
    norm = all_reduce_(square, group=group).sqrt()
    torch.nn.utils.clip_grads_with_norm_(masters, max_norm, norm.float())
    return float(norm)

"""Ulysses sequence parallelism as programs with a training loop of their own call it.

verl's engines shard tokens by themselves (`verl.models.ulysses`). Here a process remembers the
group whose ranks share sequences, inputs are padded and sliced by rank, and outputs are gathered.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from verl.utils.distributed import allgather_dict_tensors

Group = dist.ProcessGroup | None
_group: list[Group] = [None]


def set_ulysses_sequence_parallel_group(group: Group) -> None:
    _group[0] = group


def get_ulysses_sequence_parallel_group() -> Group:
    return _group[0]


def get_ulysses_sequence_parallel_world_size(group: Group = None) -> int:
    group = group or _group[0]
    return 1 if group is None else dist.get_world_size(group)


def get_ulysses_sequence_parallel_rank(group: Group = None) -> int:
    group = group or _group[0]
    return 0 if group is None else dist.get_rank(group)


def ulysses_pad(
    input_ids_rmpad: Tensor, position_ids_rmpad: Tensor | None = None, sp_size: int = 1
) -> tuple[Tensor, Tensor | None, int]:
    """(1, N) tokens padded to a multiple of the ranks; added positions count from 0."""
    pad_size = -input_ids_rmpad.shape[-1] % sp_size
    ids = F.pad(input_ids_rmpad, (0, pad_size))
    if position_ids_rmpad is None or not pad_size:
        return ids, position_ids_rmpad, pad_size
    added = torch.arange(pad_size, device=ids.device).expand(*position_ids_rmpad.shape[:-1], -1)
    return ids, torch.cat([position_ids_rmpad, added], dim=-1), pad_size


def ulysses_pad_and_slice_inputs(
    input_ids_rmpad: Tensor, position_ids_rmpad: Tensor | None = None, sp_size: int = 1
) -> tuple[Tensor, Tensor | None, int]:
    """This rank's part of the padded tokens and positions."""
    ids, positions, pad_size = ulysses_pad(input_ids_rmpad, position_ids_rmpad, sp_size)
    if sp_size > 1:
        rank = get_ulysses_sequence_parallel_rank()
        ids = ids.chunk(sp_size, dim=-1)[rank]
        positions = None if positions is None else positions.chunk(sp_size, dim=-1)[rank]
    return ids, positions, pad_size


def gather_outputs_and_unpad(
    x: Tensor,
    gather_dim: int,
    unpad_dim: int | None = None,
    padding_size: int = 0,
    grad_scaler: bool = True,
    group: Group = None,
) -> Tensor:
    """The outputs of all ranks end to end, without the padding at their end.

    Every rank computes the same loss of them. A rank gets back the gradient of its own part, times
    the number of ranks with `grad_scaler`, for optimizers that average gradients over ranks.
    """
    group = group or _group[0]
    if group is not None:
        gathered = _Gather.apply(x, gather_dim, grad_scaler, group)
        assert isinstance(gathered, Tensor)
        x = gathered
    if unpad_dim is not None and padding_size:
        x = x.narrow(unpad_dim, 0, x.shape[unpad_dim] - padding_size)
    return x


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, is_scaled: bool, group: dist.ProcessGroup) -> Tensor:
        num_ranks = dist.get_world_size(group)
        ctx.dim, ctx.rank, ctx.num_ranks = dim, dist.get_rank(group), num_ranks
        ctx.scale = num_ranks if is_scaled else 1
        parts = [torch.empty_like(x) for _ in range(num_ranks)]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim=dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        own = gradients[0].chunk(ctx.num_ranks, dim=ctx.dim)[ctx.rank]
        return own * ctx.scale, None, None, None


class FSDPUlyssesShardingManager:
    """While it is entered, ranks of the mesh's `sp` dimension share sequences.

    `preprocess_data` gives each of them the rows of all, `postprocess_data` its own rows again.
    """

    def __init__(self, device_mesh: Any = None) -> None:
        self.device_mesh = device_mesh
        self.group: Group = None if device_mesh is None else device_mesh["sp"].get_group()
        self._outer: Group = None

    def __enter__(self) -> None:
        if self.group is not None:
            self._outer = get_ulysses_sequence_parallel_group()
            set_ulysses_sequence_parallel_group(self.group)

    def __exit__(self, *_: object) -> None:
        if self.group is not None:
            set_ulysses_sequence_parallel_group(self._outer)

    def preprocess_data(self, data: Any) -> Any:
        if self.group is None:
            return data
        if data.non_tensor_batch:
            names = ", ".join(sorted(data.non_tensor_batch))
            raise ValueError(f"only tensors can be gathered over ranks; pop the columns {names}")
        size = dist.get_world_size(self.group)
        data.batch = allgather_dict_tensors(data.batch, size, self.group, dim=0)
        return data

    def postprocess_data(self, data: Any) -> Any:
        if self.group is None:
            return data
        return data.chunk(dist.get_world_size(self.group))[dist.get_rank(self.group)]

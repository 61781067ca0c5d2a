"""The process group of a job, and collectives over its ranks.

The launcher (torchrun, Ray, the local controller) puts `RANK`, `WORLD_SIZE`, `LOCAL_RANK` and the
rendezvous address into the environment; `initialize_global_process_group` turns them into a torch
process group on the right device. Its timeout bounds every collective. Ranks meet where
`DIST_INIT_METHOD` says (a file, for the local controller), at torchrun's store, or else at a store
of rank 0 that listens on `MASTER_ADDR` and on no other address.

Every rank calls the same collective; a rank that holds no values still takes part. Without a
process group there is one rank, and the results are the local ones.
"""

import gc
import ipaddress
import socket
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from torch._C._distributed_c10d import Store, TCPStore

from verl.utils import environment
from verl.utils.device import get_device_name, get_nccl_backend, get_torch_device

DEFAULT_TIMEOUT_SECONDS = 600.0
BACKLOG = 2048


def initialize_global_process_group(
    timeout_second: float = DEFAULT_TIMEOUT_SECONDS,
) -> tuple[int, int, int]:
    """Take device `LOCAL_RANK`, join the job's group, return (local rank, rank, world size).

    No collective waits longer than `timeout_second`. On a GPU the group carries CPU tensors too.
    A process that has joined already stays in its group.
    """
    local_rank = environment.local_rank()
    if get_device_name() != "cpu":
        get_torch_device().set_device(local_rank)
    initialize_global_process_group_ray(timeout_second)
    return local_rank, dist.get_rank(), dist.get_world_size()


def initialize_global_process_group_ray(timeout_second: float | None = None) -> None:
    """The same for a Ray actor, whose only visible device is its own."""
    if is_distributed():
        return
    device = get_device_name()
    timeout = timedelta(seconds=timeout_second or DEFAULT_TIMEOUT_SECONDS)
    store = store_at_master(timeout)
    dist.init_process_group(
        backend="gloo" if device == "cpu" else f"cpu:gloo,{device}:{get_nccl_backend()}",
        init_method=environment.dist_init_method() if store is None else None,
        store=store,
        timeout=timeout,
        rank=environment.rank(),
        world_size=environment.world_size(),
    )


def store_at_master(timeout: timedelta) -> Store | None:
    """The store of rank 0, bound to `MASTER_ADDR`; torch would listen on every interface.

    None where the ranks meet elsewhere, and where the address is a name: machines may not agree
    what it stands for, so torch has to listen everywhere.
    """
    address, port = environment.variable("MASTER_ADDR"), environment.variable("MASTER_PORT")
    has_meeting = environment.dist_init_method() or environment.has_agent_store()
    if has_meeting or not port or not is_ip_address(address):
        return None
    options = {"world_size": environment.world_size(), "timeout": timeout}
    if environment.rank() != 0:
        return TCPStore(address, int(port), is_master=False, **options)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, int(port)), family=family, backlog=BACKLOG)
    descriptor = listener.detach()  # the store closes it
    return TCPStore(address, int(port), is_master=True, master_listen_fd=descriptor, **options)


def is_ip_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def destroy_global_process_group() -> None:
    """Leave the process group; nothing to do when there is none.

    Its threads end with its last reference. One that is still at work when the interpreter ends
    aborts the process, so references that only the collector can end are ended here.
    """
    if is_distributed():
        dist.destroy_process_group()
        gc.collect()


Group = dist.ProcessGroup | None
ReduceOp = Any  # torch documents dist.ReduceOp.SUM and its siblings, but not their type


def distributed_mean_max_min_std(
    local_tensor: Tensor,
    compute_max: bool = True,
    compute_min: bool = True,
    compute_std: bool = True,
    group: Group = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Mean, maximum, minimum and standard deviation (n - 1) over the values of all ranks.

    What was not asked for is None. A single value has standard deviation 0.
    """
    values = local_tensor.float()
    total, count = all_reduce_(torch.stack([values.sum(), _count(values)]), group=group)
    mean = total / count.clamp(min=1)
    edges = torch.cat([values.reshape(-1), values.new_tensor([-torch.inf])]).max()
    maximum = all_reduce_(edges, dist.ReduceOp.MAX, group) if compute_max else None
    edges = torch.cat([values.reshape(-1), values.new_tensor([torch.inf])]).min()
    minimum = all_reduce_(edges, dist.ReduceOp.MIN, group) if compute_min else None
    if not compute_std:
        return mean, maximum, minimum, None
    squares = all_reduce_(((values - mean) ** 2).sum(), group=group)
    return mean, maximum, minimum, torch.sqrt(squares / (count - 1).clamp(min=1))


def distributed_masked_mean(
    local_tensor: Tensor, local_mask: Tensor, group: Group = None
) -> Tensor:
    """`masked_mean` over the values of all ranks: one sum divided by one count."""
    kept = torch.where(local_mask.bool(), local_tensor, 0) * local_mask
    sums = torch.stack([kept.sum().float(), local_mask.sum().float()])
    total, count = all_reduce_(sums, group=group)
    return total / (count + 1e-8)


def all_reduce_(tensor: Tensor, op: ReduceOp = dist.ReduceOp.SUM, group: Group = None) -> Tensor:
    """Reduce in place over the group and return it; with a single process nothing changes."""
    if is_distributed():
        moved = tensor.to(collective_device(group))
        dist.all_reduce(moved, op=op, group=group)
        tensor.copy_(moved)
    return tensor


def allgather_dict_tensors(
    tensors: Mapping[str, Tensor] | TensorDict, size: int, group: Group, dim: int = 0
) -> dict[str, Tensor] | TensorDict:
    """Every rank gets the rows of all `size` ranks, joined in rank order along `dim`.

    Keys travel in sorted order, so ranks may have inserted them differently; shapes must agree.
    """
    gathered: dict[Any, Tensor] = {}
    for key, value in _sorted_items(tensors):
        value = value.contiguous()
        parts = [torch.empty_like(value) for _ in range(size)]
        dist.all_gather(parts, value, group=group)
        gathered[key] = torch.cat(parts, dim=dim)
    if not isinstance(tensors, TensorDict):
        return gathered
    batch_size = list(tensors.batch_size)
    batch_size[dim] *= size
    return TensorDict(gathered, batch_size=batch_size)


def broadcast_dict_tensor(
    tensors: Mapping[str, Tensor] | TensorDict, src: int, group: Group
) -> None:
    """Overwrite every tensor with global rank `src`'s, in sorted key order."""
    for _, value in _sorted_items(tensors):
        dist.broadcast(value, src=src, group=group)


def split_dict_tensor_into_batches(tensors: TensorDict, batch_size: int) -> list[TensorDict]:
    """Consecutive parts of exactly `batch_size` rows."""
    if tensors.batch_size[0] % batch_size:
        raise ValueError(
            f"{tensors.batch_size[0]} rows cannot be split into batches of {batch_size}; "
            "the batch size must divide the number of rows"
        )
    return list(tensors.split(batch_size))


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def collective_device(group: Group = None) -> str:
    """Where a tensor must be to travel in this group: gloo and mpi carry CPU tensors."""
    backend = dist.get_backend(group)
    return "cpu" if backend in (dist.Backend.GLOO, dist.Backend.MPI) else get_device_name()


def _sorted_items(tensors: Mapping[Any, Any] | TensorDict) -> list[tuple[Any, Any]]:
    return sorted(tensors.items(), key=lambda item: str(item[0]))


def _count(values: Tensor) -> Tensor:
    return values.new_tensor(float(values.numel()))

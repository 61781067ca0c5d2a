"""Starting and ending the process group that all ranks of a job share.

The launcher (torchrun, Ray, the local controller) puts `RANK`, `WORLD_SIZE`, `LOCAL_RANK` and the
meeting point into the environment; here they become a torch process group on the right device.
"""

import gc
from datetime import timedelta

import torch.distributed as dist

from verl.utils import environment
from verl.utils.collectives import is_distributed
from verl.utils.device import get_device_name, get_nccl_backend, get_torch_device

DEFAULT_TIMEOUT_SECONDS = 600.0


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
    dist.init_process_group(
        backend="gloo" if device == "cpu" else f"cpu:gloo,{device}:{get_nccl_backend()}",
        init_method=environment.dist_init_method(),
        timeout=timedelta(seconds=timeout_second or DEFAULT_TIMEOUT_SECONDS),
        rank=environment.rank(),
        world_size=environment.world_size(),
    )


def destroy_global_process_group() -> None:
    """Leave the process group; nothing to do when there is none.

    Its threads end with its last reference. One that is still at work when the interpreter ends
    aborts the process, so references that only the collector can end are ended here.
    """
    if is_distributed():
        dist.destroy_process_group()
        gc.collect()

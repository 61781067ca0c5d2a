"""How a model becomes units that are divided among ranks, and where their weights come from.

A unit is a decoder layer, or all that is outside of layers. Its weights are gathered together.
"""

from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from verl.config.engine import FSDPEngineConfig
from verl.utils.distributed import collective_device
from verl.utils.torch_dtypes import PrecisionType


def refuse_options(config: FSDPEngineConfig, *, activation_offload: bool) -> None:
    if activation_offload:
        raise ValueError(
            "model.enable_activation_offload is on, but where weights are gathered for a layer "
            "they would be moved with its activations; set model.enable_gradient_checkpointing=True"
        )
    if config.wrap_policy.min_num_params:
        raise ValueError(
            f"fsdp_config.wrap_policy.min_num_params is {config.wrap_policy.min_num_params}; a "
            "unit of sharding is a transformer layer: leave it at 0"
        )


def shard_mesh(group: dist.ProcessGroup, shard_size: int, device_type: str) -> DeviceMesh:
    """Copies of the weights by ranks of each copy, or only the latter where there is one copy."""
    size = dist.get_world_size(group)
    if shard_size in (-1, size):
        return DeviceMesh.from_group(group, device_type, mesh_dim_names=("shard",))
    if shard_size < 1 or size % shard_size:
        raise ValueError(
            f"fsdp_config.fsdp_size is {shard_size}, but {size} ranks cannot hold whole copies of "
            f"the weights then; it must divide {size}, or be -1 for one copy"
        )
    ranks = torch.tensor(dist.get_process_group_ranks(group)).view(-1, shard_size)
    return DeviceMesh(device_type, ranks, mesh_dim_names=("replicate", "shard"))


def shard(
    root: nn.Module,
    module: PreTrainedModel,
    mesh: DeviceMesh,
    config: FSDPEngineConfig,
    compute_dtype: torch.dtype,
) -> list[FSDPModule]:
    """Divide every layer, and then what is left; the units in that order."""
    on_cpu = config.offload_policy or config.param_offload
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if on_cpu else OffloadPolicy()
    precision = MixedPrecisionPolicy(
        param_dtype=compute_dtype,
        reduce_dtype=PrecisionType.to_dtype(config.mixed_precision.reduce_dtype),
        cast_forward_inputs=False,  # ids and columns are what they are
    )
    units = []
    for part in (*decoder_layers(module), root):
        unit = fully_shard(
            part,
            mesh=mesh,
            reshard_after_forward=config.reshard_after_forward,
            mp_policy=precision,
            offload_policy=offload,
        )
        # Gradients are summed: losses are divided by counts over all ranks already.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        units.append(unit)
    if config.forward_prefetch:
        for unit, following in pairwise(units[:-1]):
            unit.set_modules_to_forward_prefetch([following])
    return units


def decoder_layers(module: PreTrainedModel) -> list[nn.Module]:
    """The layers that the model says must not be torn."""
    names = set(module._no_split_modules or ())
    layers = [part for part in module.modules() if type(part).__name__ in names]
    if not layers:
        raise ValueError(
            f"{type(module).__name__} does not say which of its modules are layers "
            "(_no_split_modules), by which it could be divided; set fsdp_config.sharding=zero1"
        )
    return layers


@torch.no_grad()
def fill_from_first_rank(
    module: nn.Module,
    source: nn.Module | None,
    group: dist.ProcessGroup,
    device: torch.device,
) -> None:
    """Weights and buffers of the first rank's `source`, one tensor at a time in every memory.

    Buffers are small and used as they are, so they go to the device that computes.
    """
    parameters = dict(source.named_parameters()) if source is not None else {}
    buffers = dict(source.named_buffers()) if source is not None else {}
    for name, parameter in module.named_parameters():
        whole = broadcast_from_first(parameters.get(name), parameter, group)
        local_part(parameter).copy_(own_rows(whole, as_dtensor(parameter)))
    for name, buffer in list(module.named_buffers()):
        owner, _, leaf = name.rpartition(".")
        whole = broadcast_from_first(buffers.get(name), buffer, group)
        module.get_submodule(owner)._buffers[leaf] = whole.to(device)


def broadcast_from_first(whole: Tensor | None, like: Tensor, group: dist.ProcessGroup) -> Tensor:
    device = collective_device(group)
    if whole is None:
        buffer = torch.empty(like.shape, dtype=like.dtype, device=device)
    else:
        buffer = whole.detach().to(device=device, dtype=like.dtype).contiguous()
    dist.broadcast(buffer, src=dist.get_global_rank(group, 0), group=group)
    return buffer


def own_rows(whole: Tensor, sharded: DTensor) -> Tensor:
    """This rank's rows of a tensor that is cut along its first dimension, as torch cuts it."""
    mesh = sharded.device_mesh
    rank, size = mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1)
    rows = -(-whole.shape[0] // size)
    return whole[rank * rows : (rank + 1) * rows]


def as_dtensor(tensor: Tensor) -> DTensor:
    assert isinstance(tensor, DTensor), "outside of passes every weight is divided"
    return tensor


def local_part(tensor: Tensor) -> Tensor:
    """The storage of this rank's part."""
    return as_dtensor(tensor).to_local().detach()

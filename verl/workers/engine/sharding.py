"""Several ranks and one model: their process groups, and how FSDP shards the model among them.

    rank        0   1   2   3          gradients are summed over all of them
    sequence   (0   1) (2   3)         two ranks hold the same rows and split their tokens
    data       (0       2)             one rank per shard of the rows; so do (1 3)

A loss is divided by counts over all ranks before it gets here, so gradients are summed, never
averaged, and the step is the one a single rank would make on all rows. A rank that is gone or
silent raises an error on the others, at the latest after the process group's own timeout. A unit of
sharding is a decoder layer, or all that is outside of layers; its weights are gathered together.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from verl.config.engine import FSDPEngineConfig
from verl.config.optimizer import LOOK_AT_SHAPES, FSDPOptimizerConfig
from verl.models.experts import ExpertGroup, expert_modules
from verl.models.vision import vision_parts
from verl.utils.distributed import all_reduce_, broadcast_dict_tensor, collective_device
from verl.utils.torch_dtypes import PrecisionType

BUCKET_ELEMENTS = 1 << 24
"""Gradients in one collective: 64 MiB in fp32."""


class RankGroups:
    """The process groups of one of several ranks that train a model together."""

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        sequence_group: dist.ProcessGroup | None = None,
    ) -> None:
        """`group` has all ranks that train this model; None is every rank of the job, whose process
        group must exist. The ranks of a `sequence_group` follow each other in `group`."""
        self.all = group or world_group()
        self.sequence = sequence_group
        self.data = self.all
        if sequence_group is not None:
            self.data = data_group(self.all, dist.get_world_size(sequence_group))


def world_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    if group is None:
        raise ValueError(
            "an engine on several ranks needs the process group that they share; call "
            "verl.utils.distributed.initialize_global_process_group first"
        )
    return group


def data_group(group: dist.ProcessGroup, ranks_per_sequence: int) -> dist.ProcessGroup:
    """The ranks of `group` with this one's rank in their sequence groups."""
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
    """Names of consecutive parameters of one dtype that share a collective, in one order on all
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
            "that shard the optimizer's state hold parts of them; use AdamW or another "
            "element-wise optimizer"
        )


def clip_over_ranks(
    masters: Iterable[nn.Parameter], max_norm: float, group: dist.ProcessGroup
) -> float:
    """The norm of a gradient whose shards are on the ranks of `group`; above `max_norm` every shard
    is scaled down."""
    masters = list(masters)
    gradients = [master.grad for master in masters if master.grad is not None]
    square = torch.nn.utils.get_total_norm(gradients).double().square()
    norm = all_reduce_(square, group=group).sqrt()
    torch.nn.utils.clip_grads_with_norm_(masters, max_norm, norm.float())
    return float(norm)


def refuse_options(config: FSDPEngineConfig, *, activation_offload: bool) -> None:
    if activation_offload:
        raise ValueError(
            "model.enable_activation_offload is on, but where weights are gathered for a layer "
            "they would be moved with its activations; use "
            "model.enable_gradient_checkpointing=True instead"
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


def spread_experts(
    module: PreTrainedModel, mesh: DeviceMesh, config: FSDPEngineConfig, dtype: torch.dtype
) -> set[nn.Parameter]:
    """Give each rank whole experts, an equal share of every layer's; those parameters.

    They are sharded along their first dimension as FSDP would, but never gathered: rows travel to
    their experts instead (`verl.models.experts`).
    """
    size = config.expert_parallel_size
    if size == 1:
        return set()
    experts, key = expert_modules(module), "fsdp_config.expert_parallel_size"
    if not experts or mesh.ndim != 1 or mesh.size() != size:
        raise ValueError(
            f"{key} is {size}; it spreads the experts of a model that has some (this one has "
            f"{len(experts)} layers of them), over all {mesh.size()} ranks, which hold one copy of "
            f"the weights (fsdp_size=-1): set it to 1 or {mesh.size()}"
        )
    group, spread = ExpertGroup(mesh.get_group(), dtype), set[nn.Parameter]()
    for name, part in experts.items():
        routing = vars(part)["routing"]
        if routing.num_experts % size:
            text = f"{key} ({size}) must divide the {routing.num_experts} experts of {name}"
            raise ValueError(text)
        routing.group = group
        for leaf, weight in list(part.named_parameters(recurse=False)):
            local = weight.detach()[: weight.shape[0] // size]
            whole = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
            part.register_parameter(leaf, nn.Parameter(whole, requires_grad=weight.requires_grad))
            spread.add(part.get_parameter(leaf))
    return spread


def shard(
    root: nn.Module,
    module: PreTrainedModel,
    mesh: DeviceMesh,
    config: FSDPEngineConfig,
    compute_dtype: torch.dtype,
) -> list[FSDPModule]:
    """Shard every layer, and then the rest; the units in that order."""
    on_cpu = config.offload_policy or config.param_offload
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if on_cpu else OffloadPolicy()
    precision = MixedPrecisionPolicy(
        param_dtype=compute_dtype,
        reduce_dtype=PrecisionType.to_dtype(config.mixed_precision.reduce_dtype),
        cast_forward_inputs=False,  # ids and columns are what they are
    )
    units, spread = [], spread_experts(module, mesh, config, compute_dtype)
    for part in (*decoder_layers(module), root):
        unit = fully_shard(
            part,
            mesh=mesh,
            reshard_after_forward=config.reshard_after_forward,
            mp_policy=precision,
            offload_policy=offload,
            ignored_params=spread,
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
    """The layers that the model declares in `_no_split_modules`, but those of a vision tower: a
    rank whose rows have no images does not run these."""
    names = set(module._no_split_modules or ())
    seeing = {id(part) for tower in vision_parts(module) for part in tower.modules()}
    layers = [
        part for part in module.modules() if type(part).__name__ in names and id(part) not in seeing
    ]
    if not layers:
        raise ValueError(
            f"{type(module).__name__} does not declare which of its modules are layers "
            "(_no_split_modules), by which it could be sharded; set fsdp_config.sharding=zero1"
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
        local_shard(parameter).copy_(own_rows(whole, as_dtensor(parameter)))
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
    assert isinstance(tensor, DTensor), "outside of passes every weight is sharded"
    return tensor


def local_shard(tensor: Tensor) -> Tensor:
    """The storage of this rank's shard."""
    return as_dtensor(tensor).to_local().detach()

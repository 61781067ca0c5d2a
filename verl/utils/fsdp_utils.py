"""PyTorch's FSDP as programs with a training loop of their own call it.

verl's engines shard by themselves (`verl.workers.engine`); these helpers serve models that a recipe
wraps with `FullyShardedDataParallel` (version 1) or `fully_shard` (version 2).
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import (
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from verl.utils.device import free_cached_memory, get_device_name

__all__ = ["CPUOffloadPolicy", "MixedPrecisionPolicy"]

LORA = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")


def fsdp_version(model: nn.Module) -> int:
    """1 or 2 for a wrapped model, 0 for a plain one."""
    if isinstance(model, FullyShardedDataParallel):
        return 1
    return 2 if isinstance(model, FSDPModule) else 0


# ---- building ------------------------------------------------------------------------------------


def init_fn(module: nn.Module) -> nn.Module:
    """For `param_init_fn`: ranks other than 0 hold no values yet, and allocate them."""
    if dist.get_rank() != 0:
        module = module.to_empty(device=get_device_name(), recurse=False)
        free_cached_memory()
    return module


def get_init_weight_context_manager(
    use_meta_tensor: bool = True, mesh: Any = None
) -> Callable[[], AbstractContextManager[Any]]:
    """What makes the context to load a model in: one rank reads values, the others have none."""
    reads = dist.get_rank() == 0 if mesh is None else mesh.get_coordinate()[-1] == 0
    place = "meta" if use_meta_tensor and not reads else "cpu"
    return lambda: torch.device(place)


def layer_classes(module: nn.Module, names: Iterable[str] | None) -> set[type[nn.Module]]:
    """The classes of the model's layers: those named, else those it says not to split."""
    wanted = set(names or vars(type(module)).get("_no_split_modules") or ())
    wanted |= set() if names else set(module.__dict__.get("_no_split_modules") or ())
    found = {type(one) for one in module.modules() if type(one).__name__ in wanted}
    missing = wanted - {cls.__name__ for cls in found}
    if names and missing:
        raise ValueError(f"the model has no layers of class {', '.join(sorted(missing))}")
    return found


def get_fsdp_wrap_policy(
    module: nn.Module, config: Mapping[str, Any] | None = None, is_lora: bool = False
) -> Callable[..., bool] | None:
    """Which modules FSDP 1 shards as units: by size (`min_num_params`) or by class of layer.

    With `is_lora` each adapter is a unit too, since it alone has gradients.
    """
    options = dict(config or {})
    if options.get("disable"):
        return None
    policies: list[Callable[..., bool]] = []
    if is_lora:
        policies.append(partial(lambda_auto_wrap_policy, lambda_fn=is_trained_leaf))
    if options.get("min_num_params", 0) > 0:
        size = options["min_num_params"]
        policies.append(partial(size_based_auto_wrap_policy, min_num_params=size))
    elif classes := layer_classes(module, options.get("transformer_layer_cls_to_wrap")):
        policies.append(partial(transformer_auto_wrap_policy, transformer_layer_cls=classes))
    if not policies:
        return None

    def policy(module: nn.Module, recurse: bool, **kwargs: Any) -> bool:
        return any(one(module=module, recurse=recurse, **kwargs) for one in policies)

    return policy


def is_trained_leaf(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    return not list(module.children()) and weight is not None and weight.requires_grad


def apply_fsdp2(
    model: nn.Module, fsdp_kwargs: Mapping[str, Any], config: Mapping[str, Any] | None = None
) -> None:
    """Shard each layer, an untied embedding, and then the model, in place."""
    policy = dict((config or {}).get("wrap_policy") or {})
    classes = tuple(layer_classes(model, policy.get("transformer_layer_cls_to_wrap")))
    is_tied = bool(model.config.tie_word_embeddings) if "config" in vars(model) else True  # pyright: ignore[reportAttributeAccessIssue]
    for module in list(model.modules()):
        if isinstance(module, classes) or (isinstance(module, nn.Embedding) and not is_tied):
            fully_shard(module, **fsdp_kwargs)
    fully_shard(model, **fsdp_kwargs)


def get_shard_placement_fn(fsdp_size: int) -> Callable[[nn.Parameter], Shard]:
    """For `fully_shard`: the first dimension that divides evenly, else dimension 0."""

    def place(parameter: nn.Parameter) -> Shard:
        sizes = list(parameter.shape)
        return Shard(next((i for i, size in enumerate(sizes) if size % fsdp_size == 0), 0))

    return place


def fsdp2_load_full_state_dict(
    model: nn.Module,
    full_state: Mapping[str, Tensor],
    device_mesh: Any = None,
    cpu_offload: Any = None,
) -> None:
    """Give a sharded model the whole weights that rank 0 has, and its buffers."""
    buffers = {name: one for name, one in model.named_buffers() if not one.is_meta}
    model.to_empty(device="cpu" if cpu_offload else get_device_name())
    options = StateDictOptions(
        full_state_dict=True, cpu_offload=bool(cpu_offload), broadcast_from_rank0=True
    )
    set_model_state_dict(model, dict(full_state), options=options)
    for name, buffer in model.named_buffers():
        if name in buffers:
            buffer.copy_(buffers[name])  # `to_empty` forgets those that a state dict does not have
        dist.broadcast(buffer, src=0)


@torch.no_grad()
def fsdp2_clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Clip by the norm over all ranks, which it returns; gradients may be sharded tensors."""
    every = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    grads = [one.grad for one in every if one.grad is not None]
    total = get_total_norm(grads, norm_type, error_if_nonfinite, foreach)
    if isinstance(total, DTensor):
        total = total.full_tensor()
    clip_grads_with_norm_(every, max_norm, total, foreach)
    return total


# ---- moving between device and memory ------------------------------------------------------------


def offload_fsdp_model_to_cpu(model: nn.Module, empty_cache: bool = True) -> None:
    model.to("cpu")
    if empty_cache:
        free_cached_memory()


def load_fsdp_model_to_gpu(model: nn.Module) -> None:
    model.to(get_device_name())


def offload_fsdp_optimizer(optimizer: torch.optim.Optimizer) -> None:
    load_fsdp_optimizer(optimizer, "cpu")


def load_fsdp_optimizer(optimizer: torch.optim.Optimizer, device_id: Any) -> None:
    """Move what the optimizer remembers of each parameter."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor):
                state[name] = value.to(device_id, non_blocking=True)


# ---- adapters ------------------------------------------------------------------------------------


def collect_lora_params(
    module: nn.Module, layered_summon: bool = False, base_sync_done: bool = True
) -> "OrderedDict[str, Tensor]":
    """The adapters, whole and on the CPU, under PEFT's names.

    Before the engine has the base (`base_sync_done` is False), the base weights come along, named
    as they are without adapters around them.
    """
    chosen: OrderedDict[str, Tensor] = OrderedDict()
    for name, value in module.state_dict().items():
        is_adapter = any(part in name.split(".") for part in LORA)
        if is_adapter or not base_sync_done:
            full = value.full_tensor() if isinstance(value, DTensor) else value
            plain = name.replace(".default.", ".").replace(".base_layer.", ".")
            chosen[plain] = full.detach().cpu()
    return chosen


def layered_summon_lora_params(fsdp_module: nn.Module) -> "OrderedDict[str, Tensor]":
    """`collect_lora_params`, one tensor at a time as always."""
    return collect_lora_params(fsdp_module)


def replace_lora_wrapper(k: str, peft_config: Any) -> str:
    """The name of a base weight inside its adapter: `q_proj.weight` is `q_proj.base_layer.weight`.

    "all-linear" means the projections of the layers, as PEFT's does.
    """
    way, _, last = k.rpartition(".")
    layer, targets = way.rpartition(".")[2], peft_config.target_modules
    is_target = layer.endswith("proj") if targets == "all-linear" else layer in targets
    return f"{way}.base_layer.{last}" if is_target and last in ("weight", "bias") else k

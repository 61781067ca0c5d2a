"""Small helpers that recipes import and that verl's own code does not need.

They are found under the paths that recipes know (`verl.utils.old_paths`).
"""

import gc
import inspect
import ipaddress
import socket
import string
from collections.abc import Callable, Mapping, Sequence
from random import SystemRandom
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy

from verl.utils.device import free_cached_memory, get_device_name
from verl.utils.distributed import is_distributed

Function = TypeVar("Function", bound=Callable[..., Any])

VLLM_SLEEP_LEVEL = 1
"""vLLM keeps its weights in main memory while it sleeps."""


def get_random_string(length: int) -> str:
    letters = string.ascii_letters + string.digits
    return "".join(SystemRandom().choice(letters) for _ in range(length))


def is_valid_ipv6_address(address: str) -> bool:
    try:
        return isinstance(ipaddress.ip_address(address), ipaddress.IPv6Address)
    except ValueError:
        return False


def get_free_port(address: str) -> tuple[int, socket.socket]:
    """A port of this machine and the socket that holds it; whoever listens there closes it."""
    family = socket.AF_INET6 if is_valid_ipv6_address(address) else socket.AF_INET
    holder = socket.socket(family, socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((address, 0))
    return holder.getsockname()[1], holder


def aggressive_empty_cache(force_sync: bool = True, max_retries: int = 3) -> None:
    """Collect garbage and give cached device memory back."""
    if force_sync and get_device_name() != "cpu":
        torch.accelerator.synchronize()
    gc.collect()
    free_cached_memory()


# ---- metrics -------------------------------------------------------------------------------------


def compute_response_info(batch: Any) -> dict[str, Tensor]:
    """The mask of the responses (B, T) and the lengths of prompts and responses, (B,) each."""
    num_columns = batch.batch["responses"].shape[-1]
    mask = batch.batch["attention_mask"]
    response_mask = mask[:, -num_columns:]
    return {
        "response_mask": response_mask,
        "prompt_length": mask[:, :-num_columns].sum(-1).float(),
        "response_length": response_mask.sum(-1).float(),
    }


def reduce_timing(timing_raw: Mapping[str, float], reduce_op: Any = None) -> dict[str, float]:
    """Timings over all ranks: their mean, or what `reduce_op` makes of them."""
    if not is_distributed() or not timing_raw:
        return dict(timing_raw)
    names = sorted(timing_raw)
    device = "cpu" if dist.get_backend() == "gloo" else get_device_name()
    seconds = torch.tensor([timing_raw[name] for name in names], device=device)
    dist.all_reduce(seconds, op=dist.ReduceOp.SUM if reduce_op is None else reduce_op)
    if reduce_op is None:
        seconds /= dist.get_world_size()
    return dict(zip(names, seconds.tolist(), strict=True))


def topk_reduce_ratio_min_max(timing: float, k: int = 10) -> tuple[float, float, float]:
    """How far ranks are apart: the k slowest over the k fastest, the fastest, the slowest."""
    every = [torch.zeros(1) for _ in range(dist.get_world_size())] if is_distributed() else []
    if every:
        dist.all_gather(every, torch.tensor([float(timing)]))
    seconds = torch.cat(every) if every else torch.tensor([float(timing)])
    k = min(k, len(seconds))
    slowest, fastest = seconds.topk(k).values, seconds.topk(k, largest=False).values
    return (slowest.mean() / fastest.mean()).item(), fastest.min().item(), slowest.max().item()


# ---- models --------------------------------------------------------------------------------------


def apply_monkey_patch(
    model: nn.Module, ulysses_sp_size: int = 1, use_remove_padding: bool = True, **kwargs: Any
) -> None:
    """Nothing to patch: models that verl loads have its attention, others stay as they are."""
    if ulysses_sp_size > 1:
        raise NotImplementedError(
            f"ulysses_sp_size is {ulysses_sp_size}; sequences are shared among ranks by verl's "
            "engines alone: set actor_rollout_ref.actor.ulysses_sequence_parallel_size"
        )


def enable_activation_offloading(
    model: nn.Module, strategy: str = "fsdp", enable_ckpt: bool = False
) -> None:
    """Keep what layers save for their backward pass in main memory; weights stay in place."""
    layers = max(
        (one for one in model.modules() if isinstance(one, nn.ModuleList)), key=len, default=None
    )
    if layers is None:
        raise ValueError(f"{type(model).__name__} has no list of layers to offload")
    for layer in layers:
        layer.forward = _offloading(layer.forward)


def _offloading(forward: Callable[..., Any]) -> Callable[..., Any]:
    def pack(tensor: Tensor) -> tuple[torch.device, Tensor]:
        is_weight = isinstance(tensor, nn.Parameter)
        return tensor.device, tensor if is_weight else tensor.to("cpu", non_blocking=True)

    def unpack(packed: tuple[torch.device, Tensor]) -> Tensor:
        return packed[1].to(packed[0], non_blocking=True)

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return forward(*args, **kwargs)

    return call


def create_device_mesh(world_size: int, fsdp_size: int) -> Any:
    """Ranks in one group of shards, or in `world_size / fsdp_size` copies of such groups."""
    device = get_device_name()
    if fsdp_size < 0 or fsdp_size >= world_size:
        return init_device_mesh(device, (world_size,), mesh_dim_names=("fsdp",))
    shape = (world_size // fsdp_size, fsdp_size)
    return init_device_mesh(device, shape, mesh_dim_names=("ddp", "fsdp"))


def get_sharding_strategy(device_mesh: Any) -> Any:
    """FSDP 1's: shard over all ranks, or within each copy."""
    is_whole = device_mesh.ndim == 1
    return ShardingStrategy.FULL_SHARD if is_whole else ShardingStrategy.HYBRID_SHARD


# ---- weights -------------------------------------------------------------------------------------


def patch_vllm_moe_model_weight_loader(model: nn.Module) -> None:
    """Give the weights of vLLM's expert layers the loader of their layer where they have none.

    A weight that was replaced, as after quantization, has lost the attribute that
    `model.load_weights` asks it for.
    """
    for module in model.modules():
        loader = inspect.getattr_static(module, "weight_loader", None)
        if loader is None:
            continue
        for weight in module.parameters(recurse=False):
            if "weight_loader" not in vars(weight):
                vars(weight)["weight_loader"] = module.weight_loader


class CheckpointEngineManager:
    """Brings the trainer's weights to the engines: `trainer` is the group of workers that trains,
    `replicas` the engines, which may sleep in between."""

    def __init__(self, config: Any, trainer: Any, replicas: Sequence[Any] = ()) -> None:
        self.config, self.trainer, self.replicas = config, trainer, list(replicas)

    def update_weights(self, global_steps: int | None = None) -> Any:
        """What the workers report; `config.checkpoint_engine` says how the weights travel."""
        return self.trainer.update_weights()

    def add_replicas(self, replicas: Sequence[Any]) -> None:
        """These sleep and wake with the others; a run takes in further engines by itself
        (`verl.trainer.ppo.replicas`)."""
        self.replicas += replicas

    def remove_replicas(self, replicas: Sequence[Any]) -> None:
        self.replicas = [replica for replica in self.replicas if replica not in replicas]

    def sleep_replicas(self) -> None:
        for replica in self.replicas:
            replica.sleep()

    def wake_up_replicas(self) -> None:
        for replica in self.replicas:
            replica.wake_up()

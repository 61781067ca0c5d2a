"""`EngineRegistry`: the training engines by model type, backend and device.

A backend of one's own subclasses `BaseEngine` (or `SteppingEngine`, which needs only a forward pass
and an optimizer) and registers itself. Without a backend in the spec the number of ranks and their
memory decide: `one_device` for a rank alone, `zero1` where each rank can hold the whole model,
`fsdp` where weights must be sharded.
"""

import logging
import os
from collections.abc import Callable, Iterable
from math import prod
from typing import ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from verl.config.engine import EngineConfig, FSDPEngineConfig
from verl.utils.device import use_deterministic_kernels
from verl.utils.distributed import is_distributed
from verl.utils.environment import refusing
from verl.utils.import_utils import import_external_libs
from verl.utils.registry import Registry
from verl.workers.engine.base import BaseEngine
from verl.workers.engine.memory import CudaMemory
from verl.workers.engine.spec import EngineSpec

logger = logging.getLogger(__name__)

MODEL_TYPES = ("language_model", "value_model")
DEVICES = ("cpu", "cuda", "npu")

MEGATRON = {
    f"{model_type}/megatron/{device}": "verl.workers.engine.megatron:MegatronEngine"
    for model_type in MODEL_TYPES
    for device in ("cpu", "cuda")
}
"""Imported, and the library with it, when it is asked for."""

STATE_BYTES = 12
"""Bytes per trained parameter: fp32 master and Adam's two moments."""

MEMORY_SHARE = 0.5
"""Of the device, for weights, gradients and optimizer state. The rest is for activations and for
the cache of a rollout engine beside them."""

Engine = TypeVar("Engine", bound=type[BaseEngine])


class EngineRegistry:
    """Training engines; a class is registered once per combination that it serves."""

    _engines: ClassVar = Registry[type[BaseEngine]]("training engine", **MEGATRON)

    @classmethod
    def register(
        cls,
        model_type: str | Iterable[str],
        backend: str | Iterable[str],
        device: str | Iterable[str] = DEVICES,
    ) -> Callable[[Engine], Engine]:
        """Use as a decorator of a subclass of `BaseEngine`; each argument is a name or several."""

        def add(engine: Engine) -> Engine:
            for kind in as_names(model_type):
                for name in as_names(backend):
                    for where in as_names(device):
                        cls._engines.register(f"{kind}/{name}/{where}")(engine)
            return engine

        return add

    @classmethod
    def get(cls, model_type: str, backend: str, device: str) -> type[BaseEngine]:
        return cls._engines[f"{model_type}/{backend}/{device}"]

    @classmethod
    @refusing()
    def new(cls, spec: EngineSpec) -> BaseEngine:
        """Build the engine of this rank and load its model."""
        import_external_libs(spec.model.external_lib)
        engine_config: EngineConfig = spec.engine
        if engine_config.full_determinism:
            use_deterministic_kernels()
        backend = spec.backend or choose_backend(spec)
        logger.info("training engine %s for %s on %s", backend, spec.model.path, spec.device)
        engine = cls.get(spec.model_type, backend, spec.device.partition(":")[0]).from_spec(spec)
        engine.initialize()
        return engine


def as_names(names: str | Iterable[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def choose_backend(spec: EngineSpec) -> str:
    """By the number of ranks, and by what one of them can hold."""
    num_ranks = dist.get_world_size(spec.group) if is_distributed() else 1
    if num_ranks == 1:
        return "one_device"
    is_sharded = should_shard_weights(
        spec.engine,
        spec.load_module(spec.dtype, "meta"),
        dtype=spec.dtype,
        is_trained=spec.optimizer is not None,
        num_ranks=num_ranks,
        memory_bytes=memory_of_rank(torch.device(spec.device), num_ranks),
    )
    return "fsdp" if is_sharded else "zero1"


def should_shard_weights(
    config: FSDPEngineConfig,
    skeleton: nn.Module,
    *,
    dtype: torch.dtype,
    is_trained: bool,
    num_ranks: int,
    memory_bytes: int,
) -> bool:
    """Whether `sharding` is `full`, or `auto` and one rank cannot hold the whole model."""
    if config.sharding != "auto":
        return config.sharding == "full"
    needed = bytes_per_rank(skeleton, dtype=dtype, is_trained=is_trained, num_ranks=num_ranks)
    return needed > MEMORY_SHARE * memory_bytes


def bytes_per_rank(
    skeleton: nn.Module, *, dtype: torch.dtype, is_trained: bool, num_ranks: int
) -> int:
    """Whole weights, whole gradients and one rank's shard of the optimizer's state."""
    weights = [prod(p.shape) for p in skeleton.parameters()]
    trained = [prod(p.shape) for p in skeleton.parameters() if is_trained and p.requires_grad]
    state = STATE_BYTES * sum(trained) // num_ranks
    return dtype.itemsize * (sum(weights) + sum(trained)) + state


def memory_of_rank(device: torch.device, num_ranks: int) -> int:
    """Bytes of memory per rank; ranks on a CPU share the memory of the machine."""
    if device.type == "cuda":
        return CudaMemory(device).total_bytes
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // num_ranks

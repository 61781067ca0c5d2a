"""From the options of a role to its engine."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from verl.config.engine import FSDPEngineConfig
from verl.config.model import BaseModelConfig, HFModelConfig
from verl.config.optimizer import FSDPOptimizerConfig
from verl.models.fuse import fuse_model
from verl.models.loading import empty_causal_lm, load_causal_lm
from verl.models.lora import LoraOptions, add_lora, lora_options
from verl.models.value import empty_value_model, load_value_model
from verl.utils.device import check_cpu_bf16, use_deterministic_kernels
from verl.utils.distributed import is_distributed
from verl.utils.fs import copy_to_local
from verl.utils.import_utils import import_external_libs
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.engine.base import MicroBatching
from verl.workers.engine.choice import memory_of_rank, should_divide_weights
from verl.workers.engine.fsdp import FSDPEngine
from verl.workers.engine.memory import MemoryOptions
from verl.workers.engine.one_device import OneDeviceEngine
from verl.workers.engine.zero1 import Zero1Engine


def build_engine(
    model: BaseModelConfig | HFModelConfig,
    engine: FSDPEngineConfig,
    optimizer: FSDPOptimizerConfig | None,
    *,
    device: str,
    path: str | None = None,
    max_grad_norm: float = 1.0,
    is_value_model: bool = False,
    gradient_checkpointing: bool = False,
    activation_offload: bool = False,
    probe_micro_batch: bool = False,
    is_exact: bool = False,
    keeps_start: bool = False,
    is_shared: bool = False,
    group: dist.ProcessGroup | None = None,
    sequence_group: dist.ProcessGroup | None = None,
) -> OneDeviceEngine:
    """An engine for this rank, its model loaded. `path` replaces the model's own.

    `group` has the ranks that share the model, None is all; `sequence_group` those that divide the
    tokens of the same rows. A rank that is alone has everything; several divide what
    `fsdp_config.sharding` says. With LoRA, `keeps_start` keeps the adapter that training starts
    from, for the reference. `is_shared` says that a rollout engine uses the weights in place.
    """
    import_external_libs(model.external_lib)
    if engine.full_determinism:
        use_deterministic_kernels()
    is_frozen = optimizer is None
    build_model = ModelBuilder(
        model=model,
        path=path,
        is_value_model=is_value_model,
        lora=lora_of(model, path, is_frozen=is_frozen),
        seed=engine.seed,
        keeps_start=keeps_start or is_frozen,
    )
    options: dict[str, Any] = {
        "max_grad_norm": max_grad_norm,
        "is_value_model": is_value_model,
        "gradient_checkpointing": gradient_checkpointing,
        "prefix_sharing": engine.prefix_sharing,
        "memory": MemoryOptions(
            optimizer_offload=engine.optimizer_offload,
            activation_offload=activation_offload,
            use_torch_compile=engine.use_torch_compile and not is_exact,
            probe_micro_batch=probe_micro_batch,
        ),
    }
    num_ranks = dist.get_world_size(group) if is_distributed() else 1
    if num_ranks == 1:
        dtype = compute_dtype(engine.dtype, device)
        options["memory"] = with_whole_weights(options["memory"], engine, is_shared)
        built = OneDeviceEngine(partial(build_model, dtype, device), optimizer, **options)
    else:
        options |= {"group": group, "sequence_group": sequence_group}
        built = engine_on_ranks(
            build_model, engine, optimizer, device, num_ranks, is_shared, options
        )
    built.initialize()
    return built


@dataclass(frozen=True, kw_only=True)
class ModelBuilder:
    """Loads the model of a role; on `meta` it has no weights."""

    model: BaseModelConfig | HFModelConfig
    path: str | None
    """Replaces the model's own."""

    is_value_model: bool
    lora: LoraOptions | None
    seed: int
    keeps_start: bool

    def __call__(self, dtype: torch.dtype, where: str) -> PreTrainedModel:
        options: dict[str, Any] = {} if where == "meta" else {"device": where}
        built = self._loader(is_empty=where == "meta")(
            copy_to_local(self.path or self.model.path),
            dtype=dtype,
            override_config=dict(self.model.override_config),
            trust_remote_code=self.model.trust_remote_code,
            **options,
        )
        fuse_model(built)  # on a GPU; elsewhere it changes nothing
        if self.lora is not None:
            add_lora(built, self.lora, seed=self.seed, keeps_start=self.keeps_start)
        return built

    def _loader(self, *, is_empty: bool) -> Callable[..., PreTrainedModel]:
        if self.is_value_model:
            return empty_value_model if is_empty else load_value_model
        return empty_causal_lm if is_empty else load_causal_lm


def lora_of(
    model: BaseModelConfig | HFModelConfig, path: str | None, *, is_frozen: bool
) -> LoraOptions | None:
    """A frozen model gets no adapters if it is another one, or if they would stay nothing."""
    lora = lora_options(model)
    if lora is not None and is_frozen and (path is not None or lora.adapter_path is None):
        return None
    return lora


def engine_on_ranks(
    build_model: Callable[[torch.dtype, str], PreTrainedModel],
    engine: FSDPEngineConfig,
    optimizer: FSDPOptimizerConfig | None,
    device: str,
    num_ranks: int,
    is_shared: bool,
    options: dict[str, Any],
) -> OneDeviceEngine:
    """`build_model` takes a dtype and a device; on `meta` the model has no weights."""
    dtype = compute_dtype(engine.dtype, device)
    if not should_divide_weights(
        engine,
        build_model(dtype, "meta"),
        dtype=dtype,
        is_trained=optimizer is not None,
        num_ranks=num_ranks,
        memory_bytes=memory_of_rank(torch.device(device), num_ranks),
    ):
        options["memory"] = with_whole_weights(options["memory"], engine, is_shared)
        return Zero1Engine(partial(build_model, dtype, device), optimizer, **options)
    # What is trained is its own fp32 master; what is frozen needs none.
    stored = dtype if optimizer is None else compute_dtype(engine.model_dtype, device)
    return FSDPEngine(
        partial(build_model, stored, "cpu"),
        optimizer,
        build_skeleton=partial(build_model, stored, "meta"),
        config=engine,
        compute_dtype=compute_dtype(engine.mixed_precision.param_dtype, device),
        device=device,
        **options,
    )


def with_whole_weights(
    memory: MemoryOptions, engine: FSDPEngineConfig, is_shared: bool
) -> MemoryOptions:
    """What can be done about weights that a rank holds whole."""
    if engine.param_offload and is_shared:
        raise ValueError(
            "actor.fsdp_config.param_offload is on, but the rollout engine generates with "
            "the actor's own weights, which must stay on the device; set "
            "actor.fsdp_config.optimizer_offload=True, which frees more (12 of 14 bytes per "
            "weight in 16-bit formats), or on several ranks actor.fsdp_config.sharding=full"
        )
    return replace(memory, param_offload=engine.param_offload)


def compute_dtype(name: str, device: str) -> torch.dtype:
    """The number format a model is stored and run in; `auto` is bf16, on a CPU fp32."""
    if name == "auto":
        return torch.float32 if device == "cpu" else torch.bfloat16
    dtype = PrecisionType.to_dtype(name)
    if device == "cpu" and dtype == torch.bfloat16:
        check_cpu_bf16()
    return dtype


def micro_batching(
    *, by_tokens: bool, tokens: int, rows: int | None, ranks_per_sequence: int = 1
) -> MicroBatching:
    """How a role cuts its rows, from its three options.

    `tokens` are those of one device; ranks that divide sequences run a pass together.
    """
    if by_tokens:
        return MicroBatching(tokens=tokens * ranks_per_sequence)
    return MicroBatching(rows=rows)

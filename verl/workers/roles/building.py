"""From the options of a role to its engine."""

import torch
from transformers import PreTrainedModel

from verl.config.engine import FSDPEngineConfig
from verl.config.model import BaseModelConfig, HFModelConfig
from verl.config.optimizer import FSDPOptimizerConfig
from verl.models.fuse import fuse_model
from verl.models.loading import load_causal_lm
from verl.models.value import load_value_model
from verl.utils.device import check_cpu_bf16
from verl.utils.fs import copy_to_local
from verl.utils.import_utils import import_external_libs
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.engine.base import MicroBatching
from verl.workers.engine.one_device import OneDeviceEngine


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
) -> OneDeviceEngine:
    """An engine on one device, its model loaded. `path` replaces the model's own."""
    import_external_libs(model.external_lib)
    load = load_value_model if is_value_model else load_causal_lm

    def build_model() -> PreTrainedModel:
        built = load(
            copy_to_local(path or model.path),
            dtype=compute_dtype(engine.dtype, device),
            device=device,
            override_config=dict(model.override_config),
            trust_remote_code=model.trust_remote_code,
        )
        fuse_model(built)  # on a GPU; elsewhere it changes nothing
        return built

    built = OneDeviceEngine(
        build_model,
        optimizer,
        max_grad_norm=max_grad_norm,
        is_value_model=is_value_model,
        gradient_checkpointing=gradient_checkpointing,
    )
    built.initialize()
    return built


def compute_dtype(name: str, device: str) -> torch.dtype:
    """The number format a model is stored and run in; `auto` is bf16, on a CPU fp32."""
    if name == "auto":
        return torch.float32 if device == "cpu" else torch.bfloat16
    dtype = PrecisionType.to_dtype(name)
    if device == "cpu" and dtype == torch.bfloat16:
        check_cpu_bf16()
    return dtype


def micro_batching(*, by_tokens: bool, tokens: int, rows: int | None) -> MicroBatching:
    """How a role cuts its rows, from its three options."""
    return MicroBatching(tokens=tokens) if by_tokens else MicroBatching(rows=rows)

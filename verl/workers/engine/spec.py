"""`EngineSpec`: what a training engine is built from, and how its model is loaded."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from verl.config.engine import FSDPEngineConfig
from verl.config.model import BaseModelConfig, HFModelConfig
from verl.config.optimizer import FSDPOptimizerConfig
from verl.models.fuse import fuse_model
from verl.models.loading import empty_causal_lm, empty_value_model, load_causal_lm, load_value_model
from verl.models.lora import LoraOptions, add_lora, lora_options
from verl.models.vision import freeze_tower
from verl.utils.device import check_cpu_bf16
from verl.utils.fs import copy_to_local
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.engine.memory import MemoryOptions


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """The options of a role's engine, and the ranks that train its model together."""

    model: BaseModelConfig | HFModelConfig
    engine: FSDPEngineConfig
    """Of the back-end `megatron` it is a `McoreEngineConfig`, and the optimizer Megatron's."""

    optimizer: FSDPOptimizerConfig | None
    """None: the model is frozen and runs forward only."""

    device: str
    path: str | None = None
    """Replaces the model's own."""

    model_type: Literal["language_model", "value_model"] = "language_model"
    backend: str | None = None
    """A name of `EngineRegistry`; None: by the number of ranks and `fsdp_config.sharding`."""

    max_grad_norm: float = 1.0
    gradient_checkpointing: bool = False
    activation_offload: bool = False
    probe_micro_batch: bool = False
    is_exact: bool = False
    """Whether log-probs must be those of generation, bit for bit; then nothing is compiled."""

    freezes_tower: bool = False
    """Whether the vision tower of a model that sees is not trained."""

    keeps_start: bool = False
    """Whether the adapter that training starts from is kept, for the reference policy."""

    is_shared: bool = False
    """Whether a rollout engine uses the weights in place."""

    group: dist.ProcessGroup | None = None
    """The ranks that train the model together; None: all."""

    sequence_group: dist.ProcessGroup | None = None
    """The ranks that split the tokens of the same rows."""

    @property
    def dtype(self) -> torch.dtype:
        return compute_dtype(self.engine.dtype, self.device)

    def options(self) -> dict[str, Any]:
        """Arguments that all engines on a Hugging Face module have in common."""
        return {
            "max_grad_norm": self.max_grad_norm,
            "is_value_model": self.model_type == "value_model",
            "gradient_checkpointing": self.gradient_checkpointing,
            "prefix_sharing": isinstance(self.engine, FSDPEngineConfig)
            and self.engine.prefix_sharing,
        }

    def memory(self, *, whole_weights: bool) -> MemoryOptions:
        """`whole_weights`: a rank holds all of every weight, which it may then offload itself.

        Weights that a rollout engine shares stay on the device.
        """
        return MemoryOptions(
            optimizer_offload=self.engine.optimizer_offload,
            param_offload=whole_weights and self.engine.param_offload and not self.is_shared,
            activation_offload=self.activation_offload,
            use_torch_compile=self.engine.use_torch_compile and not self.is_exact,
            probe_micro_batch=self.probe_micro_batch,
        )

    def load_module(self, dtype: torch.dtype, device: str) -> PreTrainedModel:
        """The model with its weights; on `meta` it has none."""
        is_empty, is_value_model = device == "meta", self.model_type == "value_model"
        if is_value_model:
            load = empty_value_model if is_empty else load_value_model
        else:
            load = empty_causal_lm if is_empty else load_causal_lm
        options: dict[str, Any] = {} if is_empty else {"device": device}
        module = load(
            copy_to_local(self.path or self.model.path),
            dtype=dtype,
            override_config=self.model.hf_overrides(),
            trust_remote_code=self.model.trust_remote_code,
            **options,
        )
        fuse_model(module)  # on a GPU; elsewhere it changes nothing
        if self.freezes_tower:
            freeze_tower(module)
        lora = self._lora()
        if lora is not None:
            keeps_start = self.keeps_start or self.optimizer is None
            add_lora(module, lora, seed=self.engine.seed, keeps_start=keeps_start)
        return module

    def _lora(self) -> LoraOptions | None:
        """A frozen model has no adapters if it is another one, or if they would be the identity."""
        lora = lora_options(self.model)
        is_frozen = self.optimizer is None
        if lora is not None and is_frozen and (self.path is not None or lora.adapter_path is None):
            return None
        return lora


def compute_dtype(name: str, device: str) -> torch.dtype:
    """The number format a model is stored and run in; `auto` is bf16, on a CPU fp32."""
    if name == "auto":
        return torch.float32 if device == "cpu" else torch.bfloat16
    dtype = PrecisionType.to_dtype(name)
    if device == "cpu" and dtype == torch.bfloat16:
        check_cpu_bf16()
    return dtype

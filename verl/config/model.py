"""Which model, where it comes from, and how it is prepared for training.

`HFModelConfig` describes a causal language model; `BaseModelConfig` the few things a critic or
reward model also has. Loading is left to `verl.models`.
"""

# Sections are frozen, so a variant may narrow the type of a section it inherits.
# pyright: reportIncompatibleVariableOverride=false

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from verl.config.base import Absent, BaseConfig, When, never, option
from verl.config.roles import FUSED, NEW_ADAPTERS, PACKED, is_training, uses_lora

DEFAULT_MODEL = "~/models/deepseek-llm-7b-chat"
OUR_ATTENTION = {"attn_implementation": "attention is always our own, on packed rows"}
ROPE_OVERRIDES = ("rope_scaling", "rope_parameters")
ROPE_KEYS = {
    "type", "rope_type", "rope_theta", "factor", "original_max_position_embeddings",
    "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate",
    "short_factor", "long_factor", "low_freq_factor", "high_freq_factor", "partial_rotary_factor",
    "mrope_section", "mrope_interleaved",
}  # fmt: skip
"""What `transformers` reads of a model's rotary embeddings."""
ROPE_WITH_FACTOR = ("linear", "dynamic", "yarn", "llama3")
NO_MTP = never("mtp.enable is refused")


def rope_faults(stated: Mapping[str, Any], of_model: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with the values below `override_config.rope_scaling`, each with its key.

    They are added to those that the model has.
    """
    if any(isinstance(value, Mapping) for value in stated.values()):
        return  # one set of values for each kind of layer, by the model's own names
    for name in stated.keys() - ROPE_KEYS:
        close = get_close_matches(name, ROPE_KEYS, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        yield f"{name}: rotary embeddings have no such value{hint}"
    kind = stated.get("rope_type", stated.get("type"))
    if kind in ROPE_WITH_FACTOR and "factor" not in {**of_model, **stated}:
        yield f"factor is missing: rotary embeddings of type {kind} need it"


@dataclass(kw_only=True)
class BaseModelConfig(BaseConfig):
    """The model behind a critic."""

    _target_: str = "verl.trainer.config.BaseModelConfig"

    path: str = DEFAULT_MODEL
    """Hugging Face name or folder of the weights."""

    tokenizer_path: str | None = None
    """Tokenizer, when it is not beside the weights."""

    override_config: dict[str, Any] = option(default_factory=dict, ignores=OUR_ATTENTION)
    """Values that replace those of the model's `config.json`."""

    external_lib: str | list[str] | None = None
    """Modules to import before the model is loaded, for example to register its class."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for authors you trust."""

    def hf_overrides(self) -> dict[str, Any]:
        """Values that replace those of the model's `config.json`, wherever they are stated."""
        return dict(self.override_config)


@dataclass(kw_only=True)
class FusedKernelOptions(BaseConfig):
    """The fused log-probability head."""

    impl_backend: str = option(
        "torch",
        choices=("torch", "triton"),
        used_if=never("the kernels of the log-probability head follow the device"),
    )
    """Which implementation to use."""


@dataclass(kw_only=True)
class TiledMlpConfig(BaseConfig):
    """Running MLP layers over slices of the sequence."""

    enabled: bool = option(
        False, absent=Absent("MLP layers run over whole sequences: leave it out")
    )
    """Turn it on: less memory for activations, a little slower."""

    num_shards: int = option(4, minimum=1, used_if=never("tiled_mlp.enabled is refused"))
    """Slices per sequence."""


@dataclass(kw_only=True)
class MtpConfig(BaseConfig):
    """Heads that predict several tokens ahead."""

    _target_: str = "verl.workers.config.MtpConfig"

    enable: bool = option(
        False, absent=Absent("multi-token prediction is not built in yet: leave it out")
    )
    """Load and save the weights of these heads."""

    enable_train: bool = option(
        False, absent=Absent("multi-token prediction is not built in yet: leave it out")
    )
    """Train them together with the policy."""

    enable_rollout: bool = option(
        False, absent=Absent("multi-token prediction is not built in yet: leave it out")
    )
    """Let the rollout engine draft with them, which speeds up generation."""

    detach_encoder: bool = option(False, used_if=NO_MTP)
    """Keep the gradient of their loss out of the rest of the model."""

    mtp_loss_scaling_factor: float = option(0.1, minimum=0, used_if=NO_MTP)
    """Weight of their loss."""

    speculative_algorithm: str = option("EAGLE", used_if=NO_MTP)
    """SGLang's drafting algorithm."""

    speculative_num_steps: int = option(2, minimum=1, used_if=NO_MTP)
    """SGLang: draft steps per verification."""

    speculative_eagle_topk: int = option(2, minimum=1, used_if=NO_MTP)
    """SGLang: candidates kept per draft step."""

    speculative_num_draft_tokens: int = option(4, minimum=1, used_if=NO_MTP)
    """SGLang: tokens verified at once."""

    method: str = option("mtp", used_if=NO_MTP)
    """vLLM's drafting method."""

    num_speculative_tokens: int = option(1, minimum=1, used_if=NO_MTP)
    """vLLM: tokens drafted at once."""


@dataclass(kw_only=True)
class LoraConfig(BaseConfig):
    """What FSDP reads of Megatron's LoRA section; `lora_rank` and its neighbours say the rest."""

    rank: int = option(0, minimum=0)
    """Rank of the adapters; 0 trains all weights."""

    merge: bool = option(
        False,
        used_if=When(
            lambda here, run: is_training(run) and uses_lora(run), "no LoRA: lora_rank is 0"
        ),
    )
    """Generate with a copy of the weights into which the adapters are merged after every update. It
    is faster, takes the memory of a second model, and rounds differently from training."""


NO_ADAPTERS = Absent("Megatron trains all weights here: for adapters use strategy=fsdp")
ADAPTERS = never("Megatron trains all weights here")


@dataclass(kw_only=True)
class McoreLoraConfig(LoraConfig):
    """LoRA with Megatron."""

    rank: int = option(0, minimum=0, absent=NO_ADAPTERS)

    type: str = option("lora", choices=("lora", "vlm_lora", "canonical_lora", "dora"))
    """Kind of adapter."""

    alpha: int = option(32, minimum=0)
    """Adapters are scaled by `alpha / rank`."""

    dropout: float = option(0.0, minimum=0, maximum=1)
    """Dropout inside the adapters."""

    target_modules: list[str] = option(
        default_factory=lambda: ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
    )
    """Megatron's names of the layers that get an adapter; `*` is a wildcard."""

    exclude_modules: list[str] = option(default_factory=list)
    """Layers that get none, even if targeted."""

    dropout_position: str = option("pre", choices=("pre", "post"))
    """Apply dropout before or after the adapter."""

    lora_A_init_method: str = "xavier"
    """How the first factor is initialised."""

    lora_B_init_method: str = "zero"
    """How the second factor is initialised; `zero` starts from the base model."""

    a2a_experimental: bool = False
    """Exchange adapter inputs by all-to-all communication."""

    dtype: str | None = None
    """Number format of the adapters; null takes the model's."""

    adapter_path: str | None = None
    """Start from this adapter."""

    freeze_vision_model: bool = True
    """Vision-language models: keep the vision encoder as it is."""

    freeze_vision_projection: bool = True
    """Vision-language models: keep the projection as it is."""

    freeze_language_model: bool = True
    """Vision-language models: keep the language model's own weights as they are."""


@dataclass(kw_only=True)
class HFModelConfig(BaseConfig):
    """A causal language model in Hugging Face format."""

    _target_: str = "verl.workers.config.HFModelConfig"

    path: str = DEFAULT_MODEL
    """Hugging Face name or folder of the weights."""

    hf_config_path: str | None = option(
        None, absent=Absent("config.json is read beside the weights: leave it out")
    )
    """Folder of `config.json`, when it is not beside the weights."""

    tokenizer_path: str | None = None
    """Folder of the tokenizer, when it is not beside the weights."""

    use_shm: bool = option(
        False,
        used_if=When(lambda here, run: not is_training(run), "the weights are read where they are"),
    )
    """Copy the weights to shared memory first, so that many processes read them faster."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for authors you trust."""

    custom_chat_template: str | None = None
    """Jinja chat template that replaces the tokenizer's."""

    external_lib: str | list[str] | None = None
    """Modules to import before the model is loaded, for example to register its class."""

    override_config: dict[str, Any] = option(default_factory=dict, ignores=OUR_ATTENTION)
    """Values that replace those of the model's `config.json`, for example `max_position_embeddings`
    or, for longer contexts, `rope_scaling.rope_type=yarn` with `rope_scaling.factor`."""

    enable_gradient_checkpointing: bool = True
    """Compute activations again in the backward pass: less memory, about a third more compute."""

    enable_activation_offload: bool = False
    """Keep activations in CPU memory between the forward and the backward pass."""

    use_remove_padding: bool = option(True, used_if=PACKED)
    """Pack sequences without padding, so that no compute is spent on pad tokens."""

    lora_rank: int = option(0, minimum=0)
    """Rank of LoRA adapters; 0 trains all weights."""

    lora_alpha: int = option(16, minimum=0, used_if=NEW_ADAPTERS)
    """Adapters are scaled by `lora_alpha / lora_rank`."""

    use_rslora: bool = option(False, used_if=NEW_ADAPTERS)
    """Scale adapters by `lora_alpha / sqrt(lora_rank)` instead (arXiv:2312.03732)."""

    target_modules: str | list[str] = option("all-linear", used_if=NEW_ADAPTERS)
    """Layers that get an adapter: names, a regular expression, or `all-linear`. In a model with
    experts `all-linear` are those of attention, and the name `experts` adds every expert."""

    exclude_modules: str | list[str] | None = option(None, used_if=NEW_ADAPTERS)
    """Layers that get none, even if targeted."""

    peft_type: str = option("lora", absent=Absent("LoRA is the only kind of adapter: leave it out"))
    """Kind of adapter."""

    lora_adapter_path: str | None = None
    """Start from the adapter in this folder instead of a new one. Rank, scaling and layers are the
    adapter's, and the reference policy is the model with this adapter."""

    lora: LoraConfig = option(default_factory=LoraConfig)
    """Megatron's LoRA section, of which FSDP reads these keys."""

    use_liger: bool = option(False, used_if=never("our own kernels take its place"))
    """Replace layers by Liger kernels."""

    use_fused_kernels: bool = option(False, used_if=FUSED)
    """Compute log-probabilities and entropy in one kernel that never stores all logits."""

    fused_kernel_options: FusedKernelOptions = option(default_factory=FusedKernelOptions)
    """The fused log-probability head."""

    tiled_mlp: TiledMlpConfig = option(default_factory=TiledMlpConfig)
    """Running MLP layers over slices of the sequence."""

    mtp: MtpConfig = option(default_factory=MtpConfig)
    """Heads that predict several tokens ahead."""

    def hf_overrides(self) -> dict[str, Any]:
        """Values that replace those of the model's `config.json`, wherever they are stated."""
        return dict(self.override_config)


def of_model_config(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """What Megatron's overrides replace in the model's `config.json`."""
    apart = {key: value for key, value in overrides.items() if key not in mcore_override_config()}
    return {**apart, **(overrides.get("model_config") or {})}


def mcore_override_config() -> dict[str, Any]:
    """Megatron keeps overrides of the model and of its experts apart."""
    return {"model_config": {}, "moe_config": {"freeze_moe_router": False}}


@dataclass(kw_only=True)
class McoreModelConfig(HFModelConfig):
    """A causal language model trained with Megatron."""

    _target_: str = "verl.workers.config.McoreModelConfig"

    override_config: dict[str, Any] = option(default_factory=mcore_override_config)
    """`model_config` replaces values of the model's `config.json`;
    `moe_config.freeze_moe_router` leaves the weights of routers as they are."""

    use_remove_padding: bool = option(False, used_if=never(PACKED.reason))

    lora_rank: int = option(0, minimum=0, absent=NO_ADAPTERS)

    lora_adapter_path: str | None = option(None, absent=NO_ADAPTERS)

    lora: McoreLoraConfig = option(default_factory=McoreLoraConfig, used_if=ADAPTERS)
    """LoRA with Megatron."""

    def hf_overrides(self) -> dict[str, Any]:
        return of_model_config(self.override_config)

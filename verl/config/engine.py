"""How a model is spread over devices for training: FSDP, Megatron or VeOmni.

Each back-end has its own section, mounted where a role uses it (`actor.fsdp_config`,
`critic.megatron`, `engine` of the SFT trainer). Options that a role states once for all
back-ends, such as its token budget, are copied into the section by the worker.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from verl.config.base import Absent, BaseConfig, When, never, option, runtime_value, while_on
from verl.config.model import HFModelConfig
from verl.config.optimizer import OptimizerConfig
from verl.config.profiler import ProfilerConfig
from verl.config.roles import CHUNKED, ON_GPU, SEVERAL_RANKS, SHARDED
from verl.config.trainer import CheckpointConfig

TRAINED = When(
    lambda here, run: not here.forward_only, "there is no optimizer: this model is not trained"
)
DTYPES = ("auto", "bfloat16", "bf16", "float16", "fp16", "float32", "fp32")


@dataclass(kw_only=True)
class EngineConfig(BaseConfig):
    """What every training back-end has."""

    _mutable_fields: ClassVar[set[str]] = {
        "use_dynamic_bsz",
        "max_token_len_per_gpu",
        "micro_batch_size_per_gpu",
        "infer_max_token_len_per_gpu",
        "infer_micro_batch_size_per_gpu",
        "use_fused_kernels",
        "use_remove_padding",
    }

    _target_: str = "verl.workers.config.EngineConfig"

    param_offload: bool = False
    """Keep the weights in CPU memory while the role is idle. Weights that the built-in rollout
    engine shares stay on the device."""

    optimizer_offload: bool = option(False, used_if=TRAINED)
    """Keep the optimizer's state in CPU memory while the role is idle."""

    seed: int = option(42, minimum=0)
    """Seed of the random numbers drawn while training, such as dropout."""

    full_determinism: bool = False
    """Use deterministic kernels only, in the whole process of the role. Slower; for finding out why
    two runs differ."""

    forward_only: bool = option(
        False,
        used_if=never(
            "the role decides: what is trained has an optimizer, what is frozen has none"
        ),
    )
    """Build no optimizer and keep no gradients, as for a reference policy."""

    strategy: str = option(
        "fsdp", used_if=never("the strategy of the role decides, and fsdp and fsdp2 mean the same")
    )
    """Name of the training back-end."""

    dtype: str = option("auto", choices=DTYPES)
    """Number format of the forward and backward pass; `auto` is bfloat16, on a CPU float32. With
    float16 the loss is scaled up and the gradient down again (arXiv:1710.03740)."""

    use_torch_compile: bool = option(True, used_if=ON_GPU)
    """On a GPU, compile norms and MLPs that no fused kernel fits with `torch.compile`, in training
    and scoring passes."""

    use_dynamic_bsz: bool = runtime_value(True)
    """Whether micro-batches are cut by token budget; from the role."""

    max_token_len_per_gpu: int | None = runtime_value(None)
    """Token budget of a training micro-batch on one device; from the role."""

    micro_batch_size_per_gpu: int | None = runtime_value(None)
    """Sequences in a training micro-batch on one device; from the role."""

    infer_max_token_len_per_gpu: int | None = runtime_value(None)
    """Token budget of a forward-only micro-batch on one device; from the role."""

    infer_micro_batch_size_per_gpu: int | None = runtime_value(None)
    """Sequences in a forward-only micro-batch on one device; from the role."""

    use_fused_kernels: bool = runtime_value(False)
    """Whether the fused log-probability head is used; from the model."""

    use_remove_padding: bool = runtime_value(True)
    """Whether sequences are packed without padding; from the model."""


@dataclass(kw_only=True)
class WrapPolicyConfig(BaseConfig):
    """Which modules become a unit of sharding."""

    min_num_params: int = option(
        0, minimum=0, absent=Absent("the unit of sharding is a transformer layer: leave it at 0")
    )
    """Wrap every module with at least this many parameters; 0 wraps each transformer layer."""


@dataclass(kw_only=True)
class MixedPrecisionConfig(BaseConfig):
    """Number formats inside FSDP."""

    param_dtype: str = option("auto", yaml="${..dtype}", choices=DTYPES, used_if=SHARDED)
    """Format of the gathered weights during a pass."""

    reduce_dtype: str = option("fp32", choices=DTYPES, used_if=SHARDED)
    """Format in which gradients are summed over ranks."""

    buffer_dtype: str = option(
        "fp32", choices=DTYPES, used_if=never("buffers keep the format they are created in")
    )
    """Format of buffers, such as rotary caches."""


@dataclass(kw_only=True)
class FSDPEngineConfig(EngineConfig):
    """Fully sharded data parallelism with PyTorch; also the one-device case."""

    _target_: str = "verl.workers.config.FSDPEngineConfig"

    wrap_policy: WrapPolicyConfig = option(default_factory=WrapPolicyConfig)
    """Which modules become a unit of sharding."""

    mixed_precision: MixedPrecisionConfig = option(default_factory=MixedPrecisionConfig)
    """Number formats inside FSDP."""

    strategy: str = "fsdp"
    """Name of the training back-end: `fsdp` or `fsdp2`, which both mean FSDP2."""

    offload_policy: bool = option(False, used_if=SHARDED)
    """Let FSDP2 keep weights, gradients and optimizer state in CPU memory until they are needed."""

    reshard_after_forward: bool = option(True, used_if=SHARDED)
    """Give gathered weights back after the forward pass, and sum gradients over ranks after every
    micro-batch. Off is faster and needs memory for whole weights and whole gradients: both are kept
    until the step's last micro-batch."""

    sharding: str = option("auto", choices=("auto", "zero1", "full"), used_if=SEVERAL_RANKS)
    """What ranks divide among them. `zero1`: the optimizer's state; each has whole weights, which
    the built-in rollout engine shares. `full`: the weights too. `auto` takes `zero1` where weights,
    gradients and this rank's part of the state fill at most half of the device's memory. A single
    rank divides nothing."""

    fsdp_size: int = option(-1, minimum=-1, used_if=SHARDED)
    """Devices that share one copy of the weights; -1 takes all. Smaller values keep several copies
    and communicate less between nodes."""

    prefix_sharing: bool = True
    """Compute a prompt once for all its responses in a micro-batch, in training and scoring passes.
    Changes no result beyond rounding, and on a GPU not a bit of a log-probability."""

    forward_prefetch: bool = option(False, used_if=SHARDED)
    """Gather the next layer's weights while the current layer computes."""

    model_dtype: str = option("fp32", choices=DTYPES, used_if=SHARDED)
    """Number format in which weights are loaded and stored."""

    use_orig_params: bool = option(
        False, used_if=never("FSDP2 always keeps the original parameters")
    )
    """Accepted for older scripts: FSDP2 always keeps the original parameters."""

    expert_parallel_size: int = option(1, minimum=1, used_if=SHARDED)
    """Ranks over which the experts of each layer are spread; tokens travel to them. 1, or all ranks
    that shard the weights."""

    ulysses_sequence_parallel_size: int = option(1, minimum=1)
    """Devices that share one sequence, for long contexts. Must divide the number of attention
    heads."""

    entropy_from_logits_with_chunking: bool = option(False, used_if=CHUNKED)
    """Compute entropy in chunks of tokens, which lowers peak memory."""

    entropy_checkpointing: bool = option(False, used_if=CHUNKED)
    """Compute entropy again in the backward pass instead of keeping its inputs."""


def transformer_overrides() -> dict[str, Any]:
    """The fields of Megatron's transformer configuration that people change most."""
    return {
        "recompute_granularity": None,
        "recompute_modules": ["core_attn"],
        "recompute_method": None,
        "recompute_num_layers": None,
        "attention_backend": "flash",
    }


OWN_TABLE = never("our own table converts weights between Hugging Face's names and Megatron's")
OWN_ATTENTION = {
    "attention_backend": "packed attention is our own, on every device",
}


@dataclass(kw_only=True)
class McoreEngineConfig(EngineConfig):
    """Megatron: tensor, pipeline, context and expert parallelism."""

    _mutable_fields: ClassVar[set[str]] = {*EngineConfig._mutable_fields, "sequence_parallel"}

    _target_: str = "verl.workers.config.McoreEngineConfig"

    strategy: str = option("megatron", choices=("megatron",))

    seed: int = option(
        42,
        minimum=0,
        used_if=never("nothing random is drawn: dropout is off and weights are loaded"),
    )

    use_torch_compile: bool = option(
        True, used_if=never("layers are megatron-core's, which are not compiled")
    )

    grad_offload: bool = option(
        False, used_if=never("gradients are freed after every step, so none wait on the device")
    )
    """Keep gradient buffers in CPU memory while the role is idle."""

    tensor_model_parallel_size: int = option(1, minimum=1)
    """Devices that share each weight matrix."""

    expert_model_parallel_size: int = option(1, minimum=1)
    """Devices over which the experts of a mixture-of-experts layer are spread."""

    expert_tensor_parallel_size: int | None = option(None, minimum=1)
    """Devices that share the weights of one expert; null takes `tensor_model_parallel_size`."""

    pipeline_model_parallel_size: int = option(1, minimum=1)
    """Pipeline stages: each holds a run of layers."""

    virtual_pipeline_model_parallel_size: int | None = option(None, minimum=1)
    """Runs of layers per stage, interleaved to shorten the idle time; null is one."""

    context_parallel_size: int = option(1, minimum=1)
    """Devices that share one sequence, for long contexts."""

    sequence_parallel: bool = option(True, yaml=True)
    """Split norms and dropout over the tensor-parallel devices; off when there is only one."""

    use_distributed_optimizer: bool = option(True, used_if=TRAINED)
    """Shard the optimizer's state over the data-parallel ranks."""

    use_dist_checkpointing: bool = False
    """Start from the weights of a Megatron distributed checkpoint (`torch_dist`), written on any
    layout, instead of those of `model.path`, whose configuration and tokenizer still count."""

    dist_checkpointing_path: str | None = option(None, used_if=while_on("use_dist_checkpointing"))
    """Folder of that checkpoint, with its `.metadata`."""

    dist_checkpointing_prefix: str = option("", used_if=while_on("use_dist_checkpointing"))
    """What to put before each key of that checkpoint."""

    override_ddp_config: dict[str, Any] = option(
        default_factory=dict,
        used_if=never("gradients are summed over ranks once a step, by our own optimizer"),
    )
    """Any field of Megatron's data-parallel configuration."""

    override_transformer_config: dict[str, Any] = option(
        default_factory=transformer_overrides, ignores=OWN_ATTENTION
    )
    """Any field of Megatron's transformer configuration. `recompute_granularity` is `full` or
    `selective` (then `recompute_modules` says what), `recompute_method` is `uniform` or `block`."""

    override_mcore_model_config: dict[str, Any] = option(
        default_factory=dict,
        absent=Absent("the model's own config.json decides; see override_transformer_config"),
    )
    """Any field of Megatron's model configuration."""

    use_mbridge: bool = option(True, used_if=OWN_TABLE)
    """Build the model and convert its weights through a bridge to Hugging Face formats."""

    vanilla_mbridge: bool = option(True, used_if=OWN_TABLE)
    """Which bridge: `mbridge`, or Megatron-Bridge when off."""

    use_remove_padding: bool = option(
        True, used_if=never("sequences are always packed; the numbers are those of padded ones")
    )
    """Pack sequences without padding."""

    def faults(self, path: str = "") -> Iterator[str]:
        yield from super().faults(path)
        if self.use_dist_checkpointing and not self.dist_checkpointing_path:
            key = f"{path}dist_checkpointing_path"
            yield f"{key} is null; {path}use_dist_checkpointing=True reads the folder it names"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tensor_model_parallel_size == 1:
            self.sequence_parallel = False


@dataclass(kw_only=True)
class VeOmniEngineConfig(EngineConfig):
    """VeOmni, for multimodal and mixture-of-experts models."""

    _target_: str = "verl.workers.config.VeOmniEngineConfig"

    strategy: str = option("veomni", choices=("veomni",))

    use_torch_compile: bool = False

    data_parallel_mode: str = option("fsdp2", choices=("ddp", "fsdp1", "fsdp2"))
    """How weights are kept on the data-parallel ranks."""

    data_parallel_size: int = option(1, minimum=1)
    """Data-parallel ranks."""

    data_parallel_replicate_size: int = option(1, minimum=1)
    """Copies of the sharded weights."""

    data_parallel_shard_size: int = option(1, minimum=1)
    """Devices that share one copy of the weights."""

    tensor_parallel_size: int = option(1, minimum=1)
    """Devices that share each weight matrix."""

    expert_parallel_size: int = option(1, minimum=1)
    """Devices over which experts are spread."""

    pipeline_parallel_size: int = option(1, minimum=1)
    """Pipeline stages."""

    context_parallel_size: int = option(1, minimum=1)
    """Devices that share one sequence by ring attention."""

    ulysses_parallel_size: int = option(1, minimum=1)
    """Devices that share one sequence by exchanging heads."""

    mixed_precision: bool = True
    """Compute in `dtype` while the optimizer keeps full precision."""

    init_device: str = option("meta", choices=("cpu", "cuda", "npu", "meta"))
    """Where the model is created before its weights are loaded; `meta` takes no memory."""

    enable_full_shard: bool = True
    """Shard weights as well as gradients and optimizer state."""

    ckpt_manager: str = "dcp"
    """How checkpoints are written; `dcp` is PyTorch's distributed format."""

    forward_prefetch: bool = True
    """Gather the next layer's weights while the current layer computes."""

    enable_fsdp_offload: bool = False
    """Let FSDP keep weights, gradients and optimizer state in CPU memory."""

    enable_reentrant: bool = False
    """Use the re-entrant form of gradient checkpointing."""

    attn_implementation: str = "flash_attention_2"
    """Attention kernel."""

    moe_implementation: str = option("fused", choices=("eager", "fused"))
    """Kernel of mixture-of-experts layers."""

    force_use_huggingface: bool = False
    """Take the model code from Transformers even where VeOmni has its own."""

    activation_gpu_limit: float = option(0.0, minimum=0)
    """Gigabytes of activations kept on the GPU while others are moved to the CPU."""


@dataclass(kw_only=True)
class TrainingWorkerConfig(BaseConfig):
    """All a training worker needs, gathered from the sections of its role."""

    _target_: str = "verl.workers.config.TrainingWorkerConfig"

    model_type: str = option("language_model", choices=("language_model", "value_model"))
    """What the model's head computes: log-probabilities or values."""

    model_config: HFModelConfig = option(default_factory=HFModelConfig)
    """The model."""

    engine_config: EngineConfig = option(default_factory=FSDPEngineConfig)
    """The training back-end."""

    optimizer_config: OptimizerConfig | None = None
    """The optimizer; null for a worker that only runs the model forward."""

    checkpoint_config: CheckpointConfig = option(default_factory=CheckpointConfig)
    """Contents of checkpoints."""

    profiler_config: ProfilerConfig | None = None
    """Profiling; null profiles nothing."""

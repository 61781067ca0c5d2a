"""The value model, which PPO's advantage estimator `gae` needs.

`critic.enable: null` creates it exactly when `algorithm.adv_estimator` is `gae`. Unless set here,
it follows the actor.
"""

# Sections are frozen, so a variant may narrow the type of a section it inherits.
# pyright: reportIncompatibleVariableOverride=false

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from verl.config.actor import LOSS_AGG_MODES, aggregation_named
from verl.config.base import BaseConfig, When, never, option, runtime_value, while_on
from verl.config.engine import FSDPEngineConfig, McoreEngineConfig
from verl.config.model import (
    ADAPTERS,
    DEFAULT_MODEL,
    BaseModelConfig,
    HFModelConfig,
    McoreLoraConfig,
    TiledMlpConfig,
    mcore_override_config,
    of_model_config,
)
from verl.config.optimizer import FSDPOptimizerConfig, McoreOptimizerConfig, OptimizerConfig
from verl.config.profiler import ProfilerConfig
from verl.config.roles import (
    BACK_END,
    ON_GPU,
    PACKED_CRITIC,
    RANDOM_WEIGHTS,
    RECORDED_WITH_ACTOR,
)
from verl.config.trainer import CheckpointConfig


@dataclass(kw_only=True)
class CriticModelConfig(BaseModelConfig):
    """The critic's model; like the actor's unless set."""

    path: str = option(
        DEFAULT_MODEL, yaml=f'${{oc.select:actor_rollout_ref.model.path,"{DEFAULT_MODEL}"}}'
    )
    """Hugging Face name or folder of the weights to start from; follows the actor's model."""

    tokenizer_path: str | None = option(
        DEFAULT_MODEL,
        yaml=f'${{oc.select:actor_rollout_ref.model.path,"{DEFAULT_MODEL}"}}',
        used_if=never("the critic sees token ids, never text"),
    )
    """Tokenizer; follows the actor's model."""

    external_lib: str | list[str] | None = option(
        None, yaml="${oc.select:actor_rollout_ref.model.external_lib,null}"
    )
    """Modules to import before the model is loaded; follows the actor's model."""

    trust_remote_code: bool = option(
        False, yaml="${oc.select:actor_rollout_ref.model.trust_remote_code,false}"
    )
    """Run Python code that comes with the model; follows the actor's model."""


@dataclass(kw_only=True)
class CriticConfig(BaseConfig):
    """What every critic has."""

    _mutable_fields: ClassVar[set[str]] = {
        "ppo_mini_batch_size",
        "ppo_micro_batch_size",
        "ppo_micro_batch_size_per_gpu",
        "ppo_infer_micro_batch_size_per_gpu",
        "forward_micro_batch_size",
        "forward_micro_batch_size_per_gpu",
        "model_config",
    }

    _target_: str = "verl.workers.config.CriticConfig"

    enable: bool | None = None
    """Train a critic; null does so exactly when `algorithm.adv_estimator` is `gae`."""

    strategy: str = option("fsdp", absent=BACK_END)
    """Training back-end: `fsdp`, `fsdp2` (the same), `megatron`."""

    model: BaseModelConfig = option(default_factory=CriticModelConfig)
    """The critic's model."""

    rollout_n: int = option(1, yaml="${oc.select:actor_rollout_ref.rollout.n,1}", minimum=1)
    """Responses per prompt; follows `rollout.n`."""

    ppo_mini_batch_size: int = option(
        256, yaml="${oc.select:actor_rollout_ref.actor.ppo_mini_batch_size,256}", minimum=1
    )
    """Prompts per optimizer step, over all devices; follows the actor."""

    ppo_micro_batch_size: int | None = option(None, minimum=1)
    """Deprecated: the same as `ppo_micro_batch_size_per_gpu`, but counted over all devices."""

    ppo_micro_batch_size_per_gpu: int | None = option(
        8, yaml="${oc.select:actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu,8}", minimum=1
    )
    """Sequences per forward and backward pass on one device; follows the actor."""

    use_dynamic_bsz: bool = option(
        False, yaml="${oc.select:actor_rollout_ref.actor.use_dynamic_bsz,false}"
    )
    """Cut micro-batches by tokens instead of by sequences; follows the actor."""

    ppo_max_token_len_per_gpu: int = option(
        32768,
        minimum=1,
        used_if=while_on("use_dynamic_bsz"),
    )
    """Tokens per training micro-batch on one device when `use_dynamic_bsz` is on."""

    forward_max_token_len_per_gpu: int = option(
        32768,
        yaml="${.ppo_max_token_len_per_gpu}",
        minimum=1,
        used_if=while_on("use_dynamic_bsz"),
    )
    """Tokens per micro-batch on one device when only values are computed."""

    ppo_infer_micro_batch_size_per_gpu: int | None = option(
        8,
        yaml="${.ppo_micro_batch_size_per_gpu}",
        minimum=1,
        used_if=never("forward_micro_batch_size_per_gpu decides"),
    )
    """Sequences per forward pass when only values are computed."""

    ppo_infer_max_token_len_per_gpu: int = option(
        32768,
        yaml="${.forward_max_token_len_per_gpu}",
        minimum=1,
        used_if=never("forward_max_token_len_per_gpu decides"),
    )
    """Tokens per forward pass when only values are computed."""

    ppo_epochs: int = option(1, yaml="${oc.select:actor_rollout_ref.actor.ppo_epochs,1}", minimum=1)
    """Passes over each batch of responses; follows the actor."""

    shuffle: bool = option(False, yaml="${oc.select:actor_rollout_ref.actor.shuffle,false}")
    """Shuffle the batch before it is cut into mini-batches; follows the actor."""

    data_loader_seed: int = option(
        42,
        yaml="${oc.select:actor_rollout_ref.actor.data_loader_seed,42}",
        used_if=while_on("shuffle"),
    )
    """Seed of that shuffle; follows the actor."""

    cliprange_value: float = option(0.5, above=0)
    """How far a value may move from its old value before the loss stops rewarding it."""

    loss_agg_mode: str = option(
        "token-mean",
        yaml="${oc.select:actor_rollout_ref.actor.loss_agg_mode,token-mean}",
        choices=LOSS_AGG_MODES,
    )
    """How token losses become one number; follows the actor."""

    optim: OptimizerConfig = option(default_factory=OptimizerConfig)
    """The optimizer."""

    checkpoint: CheckpointConfig = option(default_factory=CheckpointConfig)
    """Contents of checkpoints."""

    profiler: ProfilerConfig = option(default_factory=ProfilerConfig, used_if=RECORDED_WITH_ACTOR)
    """Profiling of this role."""

    model_config: HFModelConfig | None = runtime_value(None)
    """The model, handed over by the worker."""

    def faults(self, path: str = "") -> Iterator[str]:
        yield from aggregation_named(super().faults(path))


@dataclass(kw_only=True)
class FSDPCriticOptimizerConfig(FSDPOptimizerConfig):
    """The critic's optimizer with FSDP."""

    lr: float = option(1e-5, minimum=0)

    clip_grad: float = option(1.0, yaml="${oc.select:critic.grad_clip,1.0}", above=0)
    """Largest global gradient norm; follows `critic.grad_clip`."""


@dataclass(kw_only=True)
class FSDPCriticEngineConfig(FSDPEngineConfig):
    """The critic's FSDP; what the critic states itself is followed here."""

    strategy: str = option("fsdp", yaml="${oc.select:critic.strategy,fsdp}")
    """Name of the training back-end; follows `critic.strategy`."""

    ulysses_sequence_parallel_size: int = option(
        1, yaml="${oc.select:critic.ulysses_sequence_parallel_size,1}", minimum=1
    )


@dataclass(kw_only=True)
class FSDPCriticModelCfg(CriticModelConfig):
    """The critic's model with FSDP."""

    _target_: str = "verl.workers.config.FSDPCriticModelCfg"

    use_shm: bool = option(False, used_if=never("the weights are read where they are"))
    """Copy the weights to shared memory first, so that many processes read them faster."""

    enable_gradient_checkpointing: bool = True
    """Compute activations again in the backward pass: less memory, about a third more compute."""

    enable_activation_offload: bool = False
    """Keep activations in CPU memory between the forward and the backward pass."""

    use_remove_padding: bool = option(False, used_if=PACKED_CRITIC)
    """Pack sequences without padding, so that no compute is spent on pad tokens."""

    lora_rank: int = option(0, minimum=0)
    """Rank of LoRA adapters; 0 trains all weights."""

    lora_alpha: int = option(
        16, minimum=0, used_if=When(lambda here, run: here.lora_rank > 0, "no LoRA: lora_rank is 0")
    )
    """Adapters are scaled by `lora_alpha / lora_rank`."""

    target_modules: str | list[str] = option(
        "all-linear", used_if=When(lambda here, run: here.lora_rank > 0, "no LoRA: lora_rank is 0")
    )
    """Layers that get an adapter: names, a regular expression, or `all-linear`."""

    tiled_mlp: TiledMlpConfig = option(default_factory=TiledMlpConfig)
    """Running MLP layers over slices of the sequence."""

    fsdp_config: FSDPEngineConfig = option(default_factory=FSDPCriticEngineConfig)
    """How the model is spread over devices."""


@dataclass(kw_only=True)
class FSDPCriticConfig(CriticConfig):
    """A critic trained with FSDP, or on one device."""

    _target_: str = "verl.workers.config.FSDPCriticConfig"

    model: FSDPCriticModelCfg = option(default_factory=FSDPCriticModelCfg)

    forward_micro_batch_size: int | None = option(
        None, yaml="${oc.select:.ppo_micro_batch_size,null}", minimum=1
    )
    """Deprecated: the same as `forward_micro_batch_size_per_gpu`, but counted over all devices."""

    forward_micro_batch_size_per_gpu: int | None = option(
        8, yaml="${oc.select:.ppo_micro_batch_size_per_gpu,8}", minimum=1
    )
    """Sequences per forward pass on one device when only values are computed."""

    ppo_infer_micro_batch_size_per_gpu: int | None = option(
        8, yaml="${.forward_micro_batch_size_per_gpu}", minimum=1
    )

    ulysses_sequence_parallel_size: int = option(1, minimum=1)
    """Devices that share one sequence; `model.fsdp_config` follows it."""

    grad_clip: float = option(1.0, above=0)
    """Largest global gradient norm; a longer gradient is scaled down to it."""

    probe_micro_batch: bool = option(
        False, yaml="${oc.select:actor_rollout_ref.actor.probe_micro_batch,false}", used_if=ON_GPU
    )
    """Let the first update measure how many tokens of a micro-batch fit; follows the actor."""

    optim: FSDPOptimizerConfig = option(default_factory=FSDPCriticOptimizerConfig)


@dataclass(kw_only=True)
class McoreCriticModelConfig(CriticModelConfig):
    """The critic's model with Megatron."""

    _target_: str = ""

    override_config: dict[str, Any] = option(default_factory=mcore_override_config)
    """`model_config` replaces values of the model's `config.json`;
    `moe_config.freeze_moe_router` leaves the weights of routers as they are."""

    lora: McoreLoraConfig = option(default_factory=McoreLoraConfig, used_if=ADAPTERS)
    """LoRA with Megatron."""

    def hf_overrides(self) -> dict[str, Any]:
        return of_model_config(self.override_config)


@dataclass(kw_only=True)
class McoreCriticConfig(CriticConfig):
    """A critic trained with Megatron."""

    _target_: str = "verl.workers.config.McoreCriticConfig"

    strategy: str = option("megatron", choices=("megatron",))
    """Training back-end."""

    model: McoreCriticModelConfig = option(default_factory=McoreCriticModelConfig)

    nccl_timeout: int = option(
        600, minimum=1, used_if=never("actor_rollout_ref.nccl_timeout counts")
    )
    """Seconds after which a collective operation counts as hung."""

    load_weight: bool = option(True, absent=RANDOM_WEIGHTS)
    """Load the Hugging Face weights at the start."""

    optim: McoreOptimizerConfig = option(default_factory=lambda: McoreOptimizerConfig(lr=1e-5))

    megatron: McoreEngineConfig = option(default_factory=McoreEngineConfig)
    """How the model is spread over devices."""

"""The reference policy: the frozen model whose KL keeps the actor from straying.

It is created only when `actor.use_kl_loss` or `algorithm.use_kl_in_reward` is on; with LoRA it is
the actor itself as it started: without adapters, or with the one in `lora_adapter_path`. Unless set
here, it follows the actor.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from verl.config.actor_parts import RouterReplayConfig
from verl.config.base import BaseConfig, When, never, option
from verl.config.engine import FSDPEngineConfig, McoreEngineConfig, transformer_overrides
from verl.config.profiler import ProfilerConfig
from verl.config.roles import (
    BACK_END,
    CHUNKED,
    ON_GPU,
    RANDOM_WEIGHTS,
    RECORDED_WITH_ACTOR,
    is_own_reference,
)


@dataclass(kw_only=True)
class RefModelConfig(BaseConfig):
    """A reference model that is not the actor's starting point."""

    path: str | None = None
    """Hugging Face name or folder of the weights; null takes the actor's."""


@dataclass(kw_only=True)
class RefConfig(BaseConfig):
    """What every reference policy has."""

    _mutable_fields: ClassVar[set[str]] = {
        "log_prob_micro_batch_size",
        "log_prob_micro_batch_size_per_gpu",
    }

    strategy: str = option(
        "fsdp", yaml="${oc.select:actor_rollout_ref.actor.strategy,fsdp}", absent=BACK_END
    )
    """Back-end; follows the actor."""

    model: RefModelConfig = option(default_factory=RefModelConfig)
    """A reference model that is not the actor's starting point."""

    rollout_n: int = option(
        1,
        yaml="${oc.select:actor_rollout_ref.rollout.n,1}",
        minimum=1,
        used_if=never("rollout.n decides"),
    )
    """Responses per prompt; follows `rollout.n`."""

    use_torch_compile: bool = option(
        True, yaml="${oc.select:actor_rollout_ref.actor.use_torch_compile,true}", used_if=ON_GPU
    )
    """On a GPU, compile norms and MLPs that no fused kernel fits; follows the actor."""

    log_prob_micro_batch_size: int | None = option(None, minimum=1)
    """Deprecated: the same as `log_prob_micro_batch_size_per_gpu`, but counted over all devices."""

    log_prob_micro_batch_size_per_gpu: int | None = option(
        8, yaml="${oc.select:actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu,8}", minimum=1
    )
    """Sequences per forward pass on one device; follows `actor.ppo_micro_batch_size_per_gpu`."""

    log_prob_use_dynamic_bsz: bool = option(
        False, yaml="${oc.select:actor_rollout_ref.actor.use_dynamic_bsz,false}"
    )
    """Cut micro-batches by tokens instead of by sequences; follows the actor."""

    log_prob_max_token_len_per_gpu: int = option(
        16384,
        yaml="${oc.select:actor_rollout_ref.actor.ppo_max_token_len_per_gpu,16384}",
        minimum=1,
    )
    """Tokens per micro-batch on one device when cut by tokens; follows the actor."""

    profiler: ProfilerConfig = option(default_factory=ProfilerConfig, used_if=RECORDED_WITH_ACTOR)
    """Profiling of this role."""

    router_replay: RouterReplayConfig = option(
        default_factory=RouterReplayConfig,
        used_if=never("the reference is another policy, whose routers choose for themselves"),
    )
    """Replaying the routing of mixture-of-experts layers."""


@dataclass(kw_only=True)
class FSDPRefEngineConfig(FSDPEngineConfig):
    """The reference policy's FSDP; what the role states itself is followed here."""

    strategy: str = option("fsdp", yaml="${oc.select:actor_rollout_ref.ref.strategy,fsdp}")
    """Name of the training back-end; follows `ref.strategy`."""

    forward_only: bool = True
    """Build no optimizer and keep no gradients."""

    ulysses_sequence_parallel_size: int = option(
        1,
        yaml="${oc.select:actor_rollout_ref.ref.ulysses_sequence_parallel_size,1}",
        minimum=1,
        used_if=never("the reference shares sequences as the actor does"),
    )

    entropy_from_logits_with_chunking: bool = option(
        False, yaml="${oc.select:actor_rollout_ref.ref.entropy_from_logits_with_chunking,false}"
    )

    entropy_checkpointing: bool = option(
        False, yaml="${oc.select:actor_rollout_ref.ref.entropy_checkpointing,false}"
    )

    use_torch_compile: bool = option(
        True, yaml="${oc.select:actor_rollout_ref.ref.use_torch_compile,true}"
    )


@dataclass(kw_only=True)
class FSDPRefConfig(RefConfig):
    """A reference policy on FSDP, or on one device."""

    _target_: str = "verl.workers.config.FSDPRefConfig"

    ulysses_sequence_parallel_size: int = option(
        1,
        yaml="${oc.select:actor_rollout_ref.actor.ulysses_sequence_parallel_size,1}",
        minimum=1,
        used_if=never("the reference shares sequences as the actor does"),
    )
    """Devices that share one sequence; follows the actor."""

    entropy_from_logits_with_chunking: bool = option(False, used_if=CHUNKED)
    """Compute entropy in chunks of tokens."""

    entropy_checkpointing: bool = option(False, used_if=CHUNKED)
    """Compute entropy again in a backward pass."""

    fsdp_config: FSDPEngineConfig = option(
        default_factory=FSDPRefEngineConfig,
        used_if=When(
            lambda here, run: not is_own_reference(run),
            "with LoRA the reference is the actor without its adapters",
        ),
    )
    """How the model is spread over devices."""


def following(name: str, fallback: str) -> str:
    """The interpolation that takes a Megatron option from the actor."""
    return f"${{oc.select:actor_rollout_ref.actor.megatron.{name},{fallback}}}"


@dataclass(kw_only=True)
class FollowingMcoreEngineConfig(McoreEngineConfig):
    """Megatron options that are the actor's unless set."""

    seed: int = option(42, yaml=following("seed", "42"), minimum=0)

    override_transformer_config: dict[str, Any] = option(
        default_factory=transformer_overrides,
        yaml=following("override_transformer_config", "{}"),
    )
    """Any field of Megatron's transformer configuration; the actor's unless set here."""

    use_mbridge: bool = option(True, yaml=following("use_mbridge", "true"))

    vanilla_mbridge: bool = option(True, yaml=following("vanilla_mbridge", "true"))

    use_remove_padding: bool = option(True, yaml=following("use_remove_padding", "true"))


@dataclass(kw_only=True)
class McoreRefEngineConfig(FollowingMcoreEngineConfig):
    """The reference policy's Megatron, laid out like the actor's."""

    forward_only: bool = True
    """Build no optimizer and keep no gradients."""

    param_offload: bool = option(False, yaml=following("param_offload", "false"))

    tensor_model_parallel_size: int = option(
        1, yaml=following("tensor_model_parallel_size", "1"), minimum=1
    )

    expert_model_parallel_size: int = option(
        1, yaml=following("expert_model_parallel_size", "1"), minimum=1
    )

    expert_tensor_parallel_size: int | None = option(
        None, yaml=following("expert_tensor_parallel_size", "null"), minimum=1
    )

    pipeline_model_parallel_size: int = option(
        1, yaml=following("pipeline_model_parallel_size", "1"), minimum=1
    )

    virtual_pipeline_model_parallel_size: int | None = option(
        None, yaml=following("virtual_pipeline_model_parallel_size", "null"), minimum=1
    )

    context_parallel_size: int = option(1, yaml=following("context_parallel_size", "1"), minimum=1)


@dataclass(kw_only=True)
class McoreRefConfig(RefConfig):
    """A reference policy on Megatron."""

    _target_: str = "verl.workers.config.McoreRefConfig"

    strategy: str = option("megatron", choices=("megatron",))
    """Back-end."""

    load_weight: bool = option(True, absent=RANDOM_WEIGHTS)
    """Load the Hugging Face weights at the start."""

    megatron: McoreEngineConfig = option(default_factory=McoreRefEngineConfig)
    """How the model is spread over devices."""

"""The policy being trained: batch sizes, the loss, and the back-end it runs on.

`ActorConfig` is what every back-end shares; `FSDPActorConfig` and `McoreActorConfig` add theirs.
Batch sizes without `per_gpu` count prompts over all devices; sizes with `per_gpu` count sequences
on one device and only trade memory for speed.
"""

# Sections are frozen, so a variant may narrow the type of a section it inherits.
# pyright: reportIncompatibleVariableOverride=false

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from verl.config.actor_parts import PolicyLossConfig, RouterReplayConfig, SFTReplayConfig
from verl.config.algorithm import KL_TYPES
from verl.config.base import BaseConfig, When, never, option, runtime_value, while_on
from verl.config.engine import FSDPEngineConfig, McoreEngineConfig
from verl.config.optimizer import FSDPOptimizerConfig, McoreOptimizerConfig, OptimizerConfig
from verl.config.profiler import ProfilerConfig
from verl.config.roles import (
    BACK_END,
    CHUNKED,
    FUSED,
    ON_GPU,
    PACKED,
    RANDOM_WEIGHTS,
    shares_weights,
)
from verl.config.trainer import CheckpointConfig

DEFAULT_MICRO_BATCH = 8
LOSS_AGG_MODES = (
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
    "token-sum",
)
WITH_DPO = When(
    lambda here, run: here.policy_loss.loss_mode == "dpo", "only policy_loss.loss_mode=dpo uses it"
)


@dataclass(kw_only=True)
class ActorConfig(BaseConfig):
    """What every actor has."""

    _mutable_fields: ClassVar[set[str]] = {
        "ppo_mini_batch_size",
        "ppo_micro_batch_size",
        "ppo_micro_batch_size_per_gpu",
        "ppo_infer_micro_batch_size_per_gpu",
        "global_batch_info",
    }

    _target_: str = "verl.workers.config.ActorConfig"

    strategy: str = option("fsdp", absent=BACK_END)
    """Training back-end: `fsdp`, `fsdp2` (the same), `megatron`, `veomni`."""

    rollout_n: int = option(
        1,
        yaml="${oc.select:actor_rollout_ref.rollout.n,1}",
        minimum=1,
        used_if=never("rollout.n decides"),
    )
    """Responses per prompt; follows `rollout.n`."""

    ppo_mini_batch_size: int = option(256, minimum=1)
    """Prompts per optimizer step, over all devices; times `rollout.n` gives sequences."""

    ppo_micro_batch_size: int | None = option(
        None,
        minimum=1,
        used_if=When(
            lambda here, run: not here.use_dynamic_bsz,
            "use_dynamic_bsz is on: micro-batches are split by tokens",
        ),
    )
    """Deprecated: the same as `ppo_micro_batch_size_per_gpu`, but counted over all devices."""

    ppo_micro_batch_size_per_gpu: int | None = option(
        DEFAULT_MICRO_BATCH,
        minimum=1,
        used_if=When(
            lambda here, run: not here.use_dynamic_bsz,
            "use_dynamic_bsz is on: micro-batches are split by tokens",
        ),
    )
    """Sequences per forward and backward pass on one device. It never changes the gradient."""

    use_dynamic_bsz: bool = False
    """Cut micro-batches by tokens instead of by sequences, which wastes less on uneven lengths."""

    ppo_max_token_len_per_gpu: int = option(
        16384,
        minimum=1,
        used_if=while_on("use_dynamic_bsz"),
    )
    """Tokens per micro-batch on one device when `use_dynamic_bsz` is on. At least the longest
    prompt plus response."""

    ppo_infer_micro_batch_size_per_gpu: int | None = option(
        8,
        yaml="${oc.select:actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu,8}",
        minimum=1,
        used_if=never("rollout.log_prob_micro_batch_size_per_gpu decides"),
    )
    """Sequences per forward pass when only log-probabilities are computed."""

    ppo_infer_max_token_len_per_gpu: int = option(
        16384,
        yaml="${oc.select:actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu,16384}",
        minimum=1,
        used_if=never("rollout.log_prob_max_token_len_per_gpu decides"),
    )
    """Tokens per forward pass when only log-probabilities are computed."""

    ppo_epochs: int = option(1, minimum=1)
    """Passes over each batch of responses."""

    shuffle: bool = False
    """Shuffle the batch before it is cut into mini-batches."""

    data_loader_seed: int = option(42, used_if=while_on("shuffle"))
    """Seed of that shuffle."""

    clip_ratio: float = option(
        0.2,
        minimum=0,
        used_if=When(
            lambda here, run: here.clip_ratio in (here.clip_ratio_low, here.clip_ratio_high),
            "clip_ratio_low and clip_ratio_high are both set",
        ),
    )
    """PPO's clip: the ratio of new to old probability earns nothing beyond 1 +- this."""

    clip_ratio_low: float = option(0.2, yaml="${.clip_ratio}", minimum=0)
    """Clip below 1; follows `clip_ratio`."""

    clip_ratio_high: float = option(0.2, yaml="${.clip_ratio}", minimum=0)
    """Clip above 1; follows `clip_ratio`. DAPO raises it to 0.28 to keep exploration alive."""

    clip_ratio_c: float = option(
        3.0,
        above=1,
        used_if=When(
            lambda here, run: here.policy_loss.loss_mode == "vanilla",
            "only policy_loss.loss_mode=vanilla has a dual clip",
        ),
    )
    """Dual clip: bound on the ratio when the advantage is negative."""

    tau_pos: float = option(
        1.0,
        above=0,
        used_if=When(
            lambda here, run: here.policy_loss.loss_mode == "sapo",
            "only policy_loss.loss_mode=sapo uses it",
        ),
    )
    """SAPO: temperature of the soft clip for positive advantages."""

    tau_neg: float = option(
        1.05,
        above=0,
        used_if=When(
            lambda here, run: here.policy_loss.loss_mode == "sapo",
            "only policy_loss.loss_mode=sapo uses it",
        ),
    )
    """SAPO: temperature of the soft clip for other advantages."""

    dpo_beta: float = option(0.1, above=0, used_if=WITH_DPO)
    """DPO: scale of the log-ratio to the reference; larger stays closer to it."""

    dpo_loss_type: str = option("sigmoid", choices=("sigmoid", "ipo"), used_if=WITH_DPO)
    """DPO: loss on the margin between chosen and rejected."""

    dpo_label_smoothing: float = option(
        0.0,
        minimum=0,
        maximum=0.5,
        used_if=(
            WITH_DPO,
            When(lambda here, run: here.dpo_loss_type == "sigmoid", "dpo_loss_type is ipo"),
        ),
    )
    """DPO: how often a preference is taken to be the wrong way round."""

    dpo_reference_free: bool = option(False, used_if=WITH_DPO)
    """DPO: compare log-probs themselves, without a reference."""

    sppo_eta: float = option(
        1.0,
        above=0,
        used_if=When(
            lambda here, run: here.policy_loss.loss_mode == "sppo",
            "only policy_loss.loss_mode=sppo uses it",
        ),
    )
    """SPPO: log-ratio that a reward of 1 above its baseline aims at."""

    policy_loss: PolicyLossConfig = option(default_factory=PolicyLossConfig)
    """Which policy loss, and the settings of those that have their own."""

    loss_agg_mode: str = option("token-mean", choices=LOSS_AGG_MODES)
    """How token losses become one number: every token counts the same, or every sequence does.
    Dr.GRPO uses `seq-mean-token-sum-norm`; `token-sum` divides by nothing."""

    loss_scale_factor: int | None = option(
        None,
        minimum=1,
        used_if=When(
            lambda here, run: here.loss_agg_mode == "seq-mean-token-sum-norm",
            "only loss_agg_mode=seq-mean-token-sum-norm uses it",
        ),
    )
    """Divisor of `seq-mean-token-sum-norm`; null takes the padded response length."""

    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""

    calculate_entropy: bool = option(False, used_if=never("the entropy is always reported"))
    """Accepted for older scripts: the policy's entropy is always reported."""

    use_kl_loss: bool = False
    """Add the KL to the reference policy to the loss, as GRPO does."""

    kl_loss_coef: float = option(0.001, minimum=0, used_if=while_on("use_kl_loss"))
    """Weight of that KL."""

    kl_loss_type: str = option(
        "low_var_kl",
        choices=KL_TYPES,
        used_if=while_on("use_kl_loss"),
    )
    """Estimator of that KL. A trailing `+` takes its value with the gradient of `k2`."""

    sft_replay: SFTReplayConfig = option(default_factory=SFTReplayConfig)
    """Demonstrations that join the rows of an update, trained by cross-entropy."""

    ce_on_tool_text_coef: float = option(0.0, minimum=0)
    """Weight of a cross-entropy on the response tokens that the policy did not write: replies of
    tools, users and environments. 0: none."""

    positive_nll_coef: float = option(0.0, minimum=0)
    """Weight of a cross-entropy on responses that are right (VAPO, arXiv:2504.05118, has 0.1),
    divided by their tokens; 0 has none."""

    positive_nll_min_score: float = option(
        1.0,
        used_if=When(lambda here, run: here.positive_nll_coef > 0, "positive_nll_coef is 0"),
    )
    """From which `acc` (or score, where graders report no `acc`) on a response counts as right."""

    use_rollout_log_probs: bool = False
    """Take the rollout's log-probabilities as the old policy's (fully asynchronous training)."""

    calculate_sum_pi_squared: bool = False
    """Also compute the sum of squared probabilities, which `optimal_token_baseline` needs."""

    sum_pi_squared_checkpointing: bool = option(
        False, used_if=never("the sum is computed in chunks, which keep no inputs")
    )
    """Compute that sum again in the backward pass instead of keeping its inputs."""

    freeze_vision_tower: bool = False
    """Vision-language models: do not train the vision encoder."""

    use_prefix_grouper: bool = option(
        False, used_if=never("fsdp_config.prefix_sharing decides, and is on by default")
    )
    """Run the prompt once for all its responses in the training pass."""

    use_torch_compile: bool = option(True, used_if=ON_GPU)
    """On a GPU, compile norms and MLPs that no fused kernel fits with `torch.compile`, in training
    and scoring passes. Log-probabilities and entropy have kernels of their own."""

    use_fused_kernels: bool = option(
        False, yaml="${oc.select:actor_rollout_ref.model.use_fused_kernels,false}", used_if=FUSED
    )
    """Fused log-probability head; follows `model.use_fused_kernels`."""

    optim: OptimizerConfig = option(default_factory=OptimizerConfig)
    """The optimizer."""

    checkpoint: CheckpointConfig = option(default_factory=CheckpointConfig)
    """Contents of checkpoints."""

    profiler: ProfilerConfig = option(default_factory=ProfilerConfig)
    """Profiling of this role."""

    router_replay: RouterReplayConfig = option(default_factory=RouterReplayConfig)
    """Replaying the routing of mixture-of-experts layers."""

    global_batch_info: dict[str, Any] = runtime_value(default_factory=dict)
    """Counts over the whole mini-batch, which losses divide by: keyword arguments of `agg_loss`."""

    def faults(self, path: str = "") -> Iterator[str]:
        for text in super().faults(path):
            is_mode = text.startswith(f"{path}loss_agg_mode is")
            yield f"{text} (Invalid loss_agg_mode)" if is_mode else text
        over_all, per_gpu = self.ppo_micro_batch_size, self.ppo_micro_batch_size_per_gpu
        if self.use_dynamic_bsz:
            return
        if over_all is not None and per_gpu not in (None, DEFAULT_MICRO_BATCH):
            yield (
                f"{path}ppo_micro_batch_size is {over_all} and ppo_micro_batch_size_per_gpu is "
                f"{per_gpu}. You have set both; they say the same in two ways, so remove "
                "ppo_micro_batch_size"
            )
        if over_all is None and per_gpu is None:
            yield (
                f"{path}ppo_micro_batch_size_per_gpu is null, and so is ppo_micro_batch_size. "
                "Please set at least one, or use_dynamic_bsz=True"
            )

    def validate(
        self,
        n_gpus: int,
        train_batch_size: int,
        model_config: Mapping[str, Any] | None = None,
    ) -> None:
        """Raise a ValueError if the batch sizes do not fit together on `n_gpus` devices."""
        mini, micro = self.ppo_mini_batch_size, self.ppo_micro_batch_size
        if self.use_dynamic_bsz:
            return
        if train_batch_size < mini:
            raise ValueError(
                f"train_batch_size ({train_batch_size}) must be >= ppo_mini_batch_size ({mini})"
            )
        if micro is None:
            return
        ranks = self.get("ulysses_sequence_parallel_size", 1)
        if mini % micro:
            raise ValueError(
                f"ppo_mini_batch_size ({mini}) must be a multiple of ppo_micro_batch_size ({micro})"
            )
        if micro * ranks < n_gpus:
            raise ValueError(
                f"ppo_micro_batch_size ({micro}) * ulysses_sequence_parallel_size ({ranks}) must "
                f"be >= n_gpus ({n_gpus})"
            )


@dataclass(kw_only=True)
class FSDPActorOptimizerConfig(FSDPOptimizerConfig):
    """The actor's optimizer with FSDP."""

    lr: float = option(1e-6, minimum=0)

    clip_grad: float = option(
        1.0, yaml="${oc.select:actor_rollout_ref.actor.grad_clip,1.0}", above=0
    )
    """Largest global gradient norm; follows `actor.grad_clip`."""


@dataclass(kw_only=True)
class FSDPActorEngineConfig(FSDPEngineConfig):
    """The actor's FSDP; what the actor states itself is followed here."""

    param_offload: bool = option(
        False,
        used_if=When(
            lambda here, run: not shares_weights(run),
            "the built-in rollout engine generates with these weights, so they stay on the device; "
            "optimizer_offload frees more",
        ),
    )

    strategy: str = option("fsdp", yaml="${oc.select:actor_rollout_ref.actor.strategy,fsdp}")
    """Name of the training back-end; follows `actor.strategy`."""

    ulysses_sequence_parallel_size: int = option(
        1, yaml="${oc.select:actor_rollout_ref.actor.ulysses_sequence_parallel_size,1}", minimum=1
    )

    entropy_from_logits_with_chunking: bool = option(
        False, yaml="${oc.select:actor_rollout_ref.actor.entropy_from_logits_with_chunking,false}"
    )

    entropy_checkpointing: bool = option(
        False, yaml="${oc.select:actor_rollout_ref.actor.entropy_checkpointing,false}"
    )

    use_torch_compile: bool = option(
        True, yaml="${oc.select:actor_rollout_ref.actor.use_torch_compile,true}"
    )


@dataclass(kw_only=True)
class FSDPActorConfig(ActorConfig):
    """An actor trained with FSDP, or on one device."""

    _target_: str = "verl.workers.config.FSDPActorConfig"

    grad_clip: float = option(1.0, above=0)
    """Largest global gradient norm; a longer gradient is scaled down to it."""

    ulysses_sequence_parallel_size: int = option(1, minimum=1)
    """Devices that share one sequence; `fsdp_config` follows it."""

    entropy_from_logits_with_chunking: bool = option(False, used_if=CHUNKED)
    """Compute entropy in chunks of tokens; `fsdp_config` follows it."""

    entropy_checkpointing: bool = option(False, used_if=CHUNKED)
    """Compute entropy again in the backward pass; `fsdp_config` follows it."""

    use_remove_padding: bool = option(
        True, yaml="${oc.select:actor_rollout_ref.model.use_remove_padding,true}", used_if=PACKED
    )
    """Pack sequences without padding; follows `model.use_remove_padding`."""

    probe_micro_batch: bool = option(False, used_if=ON_GPU)
    """Let the first update measure how many tokens of a micro-batch fit into 90% of the device's
    memory, beginning at the configured size, and use that number from then on. On a GPU; never
    changes the gradient."""

    optim: FSDPOptimizerConfig = option(default_factory=FSDPActorOptimizerConfig)

    fsdp_config: FSDPEngineConfig = option(default_factory=FSDPActorEngineConfig)
    """How the model is spread over devices."""

    def validate(
        self,
        n_gpus: int,
        train_batch_size: int,
        model_config: Mapping[str, Any] | None = None,
    ) -> None:
        super().validate(n_gpus, train_batch_size, model_config)
        is_packed = model_config is None or model_config.get("use_remove_padding", True)
        if self.ulysses_sequence_parallel_size > 1 and not is_packed:
            raise ValueError(
                f"ulysses_sequence_parallel_size is {self.ulysses_sequence_parallel_size}; with "
                "more than 1 you must enable `use_remove_padding`"
            )


@dataclass(kw_only=True)
class McoreActorConfig(ActorConfig):
    """An actor trained with Megatron."""

    _target_: str = "verl.workers.config.McoreActorConfig"

    strategy: str = option("megatron", choices=("megatron",))
    """Training back-end."""

    load_weight: bool = option(True, absent=RANDOM_WEIGHTS)
    """Load the Hugging Face weights at the start."""

    optim: McoreOptimizerConfig = option(default_factory=lambda: McoreOptimizerConfig(lr=1e-6))

    megatron: McoreEngineConfig = option(default_factory=McoreEngineConfig)
    """How the model is spread over devices."""

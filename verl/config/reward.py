"""Where scores come from: a function, a manager that calls it, or a reward model.

A score comes from `custom_reward_function` if a path is given, else from the function registered
for the row's `data_source`; `reward_model.enable` adds a model. The manager decides how samples
reach the function.
"""

# Sections are frozen, so a variant may narrow the type of a section it inherits.
# pyright: reportIncompatibleVariableOverride=false

from dataclasses import dataclass
from typing import Any, ClassVar

from verl.config.base import BaseConfig, When, never, option, while_on
from verl.config.engine import FSDPEngineConfig, McoreEngineConfig
from verl.config.model import DEFAULT_MODEL, OUR_ATTENTION, FusedKernelOptions
from verl.config.optimizer import FSDPOptimizerConfig
from verl.config.profiler import ProfilerConfig, SharedToolProfilerConfig
from verl.config.ref import FollowingMcoreEngineConfig
from verl.config.roles import (
    BACK_END,
    LIMITED,
    NOT_PRIME,
    PACKED,
    PRIME,
    RANDOM_WEIGHTS,
    RECORDED_WITH_ACTOR,
    REWARD_MODEL,
    runs_prime,
)
from verl.config.serving import ServingConfig


@dataclass(kw_only=True)
class ModuleConfig(BaseConfig):
    """A Python file to import."""

    _target_: str = "verl.trainer.config.config.ModuleConfig"

    path: str | None = None
    """The file, or `pkg://package.module`."""

    name: str = "custom_module"
    """Name under which it is imported."""


@dataclass(kw_only=True)
class RewardManagerConfig(BaseConfig):
    """How samples reach the reward function."""

    _target_: str = "verl.trainer.config.config.RewardManagerConfig"

    source: str = option("register", choices=("register", "importlib"))
    """Take a registered manager, or import one from `module.path`."""

    name: str = option("naive", yaml="${oc.select:reward_model.reward_manager,naive}")
    """Registered name (`naive`, `batch`, `dapo`, `prime`, `rate_limited`, `judge`, ...), or the
    class name when imported."""

    module: ModuleConfig | None = option(
        default_factory=lambda: ModuleConfig(name="custom_reward_manager"),
        used_if=When(lambda here, run: here.source == "importlib", "source is register"),
    )
    """The file of an imported manager."""


@dataclass(kw_only=True)
class CustomRewardFunctionConfig(BaseConfig):
    """A reward function of your own."""

    path: str | None = None
    """File, or `pkg://package.module`, with `compute_score(data_source, solution_str, ground_truth,
    extra_info)`; null uses the function registered for the row's `data_source`."""

    name: str = option(
        "compute_score",
        used_if=When(
            lambda here, run: here.path is not None,
            "path is null: the function registered for the data source is used",
        ),
    )
    """Name of the function."""

    reward_kwargs: dict[str, Any] = option(
        default_factory=dict,
        used_if=When(
            lambda here, run: here.path is not None,
            "path is null: the function registered for the data source is used",
        ),
    )
    """More keyword arguments for every call."""


@dataclass(kw_only=True)
class SandboxFusionConfig(BaseConfig):
    """A Sandbox Fusion service that runs code for rewards."""

    _target_: str = "verl.workers.config.SandboxFusionConfig"

    url: str | None = None
    """Address of its `run_code` endpoint; null runs code in a local sandbox."""

    max_concurrent: int = option(
        64,
        minimum=1,
        used_if=When(
            lambda here, run: here.url is not None,
            "sandbox_fusion.url is null: code runs in the local sandbox",
        ),
    )
    """Most requests at the same time."""

    memory_limit_mb: int = option(
        1024,
        minimum=1,
        used_if=When(
            lambda here, run: here.url is not None,
            "sandbox_fusion.url is null: code runs in the local sandbox",
        ),
    )
    """Memory of one run, in megabytes."""


FROZEN_REFERENCE = When(lambda here, run: here.ref_type == "freeze", "ref_type is policy")


@dataclass(kw_only=True)
class RewardModelModelConfig(BaseConfig):
    """The weights of the reward model."""

    path: str = "~/models/FsfairX-LLaMA3-RM-v0.1"
    """Hugging Face name or folder: a sequence or token classifier with one label, or a language
    model with a value head. For the recipe prime a language model, with the policy's tokenizer."""

    input_tokenizer: str | None = option(
        DEFAULT_MODEL, yaml="${actor_rollout_ref.model.path}", used_if=NOT_PRIME
    )
    """Tokenizer of the policy, to turn its responses into text for the reward model's template;
    null when both share tokenizer and template."""

    external_lib: str | list[str] | None = option(
        None, yaml="${actor_rollout_ref.model.external_lib}"
    )
    """Modules to import before the model is loaded; follows the actor's model."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for authors you trust."""

    override_config: dict[str, Any] = option(default_factory=dict, ignores=OUR_ATTENTION)
    """Values that replace those of the model's `config.json`."""


@dataclass(kw_only=True)
class RewardRolloutConfig(ServingConfig):
    """The engine that serves the reward model."""

    _other_targets: ClassVar[tuple[str, ...]] = ("verl.workers.config.RolloutConfig",)

    name: str = option("native", yaml="${oc.select:actor_rollout_ref.rollout.name,native}")
    """Engine; follows `actor_rollout_ref.rollout.name`."""

    max_num_seqs: int = option(1024, minimum=1)
    """Most sequences scored at the same time."""

    skip_tokenizer_init: bool = option(False, choices=(False,))
    """Must stay off: the reward model reads text."""

    prompt_length: int = option(2048, minimum=1)

    response_length: int = option(2048, minimum=1)

    engine_kwargs: dict[str, Any] = option(default_factory=dict)
    """Arguments passed on to the engine."""


@dataclass(kw_only=True)
class RewardModelConfig(BaseConfig):
    """A model that scores responses, and how rewards are computed in general."""

    _target_: str = "verl.workers.config.RewardModelConfig"

    enable: bool = False
    """Score responses with a reward model."""

    enable_resource_pool: bool = option(False, used_if=REWARD_MODEL)
    """Give the reward model `nnodes * n_gpus_per_node` processes of its own, sharing rows."""

    n_gpus_per_node: int = option(8, minimum=0, used_if=REWARD_MODEL)
    """Devices per node of that pool."""

    nnodes: int = option(0, minimum=0, used_if=REWARD_MODEL)
    """Nodes of that pool."""

    strategy: str = option("fsdp", absent=BACK_END)
    """Back-end of a reward model that runs in the trainer's workers."""

    model: RewardModelModelConfig = option(
        default_factory=RewardModelModelConfig, used_if=REWARD_MODEL
    )
    """The weights of the reward model."""

    rollout: RewardRolloutConfig = option(
        default_factory=RewardRolloutConfig,
        used_if=never("the reward model runs in the trainer's workers and not in an engine"),
    )
    """The engine that serves the reward model."""

    micro_batch_size: int | None = option(None, minimum=1)
    """Deprecated: the same as `micro_batch_size_per_gpu`, but counted over all devices."""

    micro_batch_size_per_gpu: int | None = option(
        8,
        yaml="${oc.select:actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu,8}",
        minimum=1,
        used_if=(
            REWARD_MODEL,
            When(
                lambda here, run: not here.use_dynamic_bsz,
                "use_dynamic_bsz is on: micro-batches are split by tokens",
            ),
        ),
    )
    """Sequences per forward pass on one device; follows `actor.ppo_micro_batch_size_per_gpu`."""

    use_dynamic_bsz: bool = option(False, yaml="${critic.use_dynamic_bsz}", used_if=REWARD_MODEL)
    """Cut micro-batches by tokens instead of by sequences; follows the critic."""

    forward_max_token_len_per_gpu: int = option(
        32768,
        yaml="${critic.forward_max_token_len_per_gpu}",
        minimum=1,
        used_if=(
            REWARD_MODEL,
            while_on("use_dynamic_bsz"),
        ),
    )
    """Tokens per micro-batch on one device when cut by tokens; follows the critic."""

    max_length: int | None = option(None, minimum=1, used_if=(REWARD_MODEL, NOT_PRIME))
    """Most tokens the reward model sees; null sets no limit."""

    truncation: str = option(
        "right",
        choices=("left", "right", "error"),
        used_if=(
            REWARD_MODEL,
            When(
                lambda here, run: here.max_length is not None, "max_length is null: nothing is cut"
            ),
        ),
    )
    """Where longer inputs are cut."""

    reward_manager: str = "naive"
    """Registered reward manager; `reward_manager.name` follows it."""

    reward_kwargs: dict[str, Any] = option(default_factory=dict)
    """Keyword arguments of the reward manager, for example `max_resp_len` and `overlong_buffer_cfg`
    of `dapo`."""

    use_reward_loop: bool = True
    """Score each response as soon as it is generated, rather than the whole batch at the end."""

    num_workers: int = option(
        1,
        minimum=1,
        used_if=When(
            lambda here, run: (
                here.reward_loop_source != "register"
                or run.reward_manager.source != "register"
                or run.reward_manager.name == "remote"
            ),
            "only the reward manager remote uses it; others have reward_kwargs.num_workers",
        ),
    )
    """Manager `remote`: processes that score responses. For the others, `reward_kwargs.num_workers`
    says how many responses are scored at the same time."""

    reward_loop_source: str = option("register", choices=("register", "importlib"))
    """Take a registered per-sample manager, or import one from `reward_loop_module_path`."""

    reward_loop_module_path: str | None = option(
        None,
        used_if=When(
            lambda here, run: here.reward_loop_source != "register",
            "reward_loop_source is register",
        ),
    )
    """File of an imported manager."""

    reward_loop_class_name: str | None = option(
        None,
        used_if=When(
            lambda here, run: here.reward_loop_source != "register",
            "reward_loop_source is register",
        ),
    )
    """Class of an imported manager."""

    launch_reward_fn_async: bool = option(
        False, used_if=never("responses are always scored as soon as they end")
    )
    """Accepted for older scripts: grading always runs beside generation."""

    sandbox_fusion: SandboxFusionConfig = option(default_factory=SandboxFusionConfig)
    """A Sandbox Fusion service that runs code for rewards."""

    audit_ratio: float = option(
        0.01,
        minimum=0,
        maximum=1,
        used_if=When(
            lambda here, run: run.custom_reward_function.path is None,
            "custom_reward_function.path is set: only built-in graders are audited",
        ),
    )
    """Share of the responses that `prime_math` and `geo3k` have scored which math-verify grades
    too, if it is installed; scores stay as they are, disagreement raises an alarm. Scores with the
    penalty of `reward_manager=dapo` are not audited."""

    max_concurrent: int = option(1, minimum=1, used_if=LIMITED)
    """Managers `rate_limited` and `judge`: most requests at the same time."""

    max_rpm: int | None = option(None, minimum=1, used_if=LIMITED)
    """Managers `rate_limited` and `judge`: requests per minute; null sets no limit."""

    max_tpm: int | None = option(None, minimum=1, used_if=LIMITED)
    """Managers `rate_limited` and `judge`: tokens per minute; null sets no limit."""

    estimated_tokens_per_request: int = option(2000, minimum=1, used_if=LIMITED)
    """Managers `rate_limited` and `judge`: tokens a request is taken to cost."""

    timeout: float = option(300.0, above=0, used_if=LIMITED)
    """Managers `rate_limited` and `judge`: seconds until a request counts as failed."""

    profiler: ProfilerConfig = option(
        default_factory=SharedToolProfilerConfig, used_if=RECORDED_WITH_ACTOR
    )
    """Profiling of this role."""


@dataclass(kw_only=True)
class ImplicitOptimizerConfig(FSDPOptimizerConfig):
    """The optimizer of PRIME's implicit model."""

    lr: float = option(1e-6, minimum=0)

    weight_decay: float = option(0.0, minimum=0)

    clip_grad: float = option(10.0, above=0)


@dataclass(kw_only=True)
class FSDPRewardEngineConfig(FSDPEngineConfig):
    """The reward model's FSDP."""

    strategy: str = option("fsdp", yaml="${oc.select:reward_model.strategy,fsdp}")
    """Name of the back-end; follows `reward_model.strategy`."""

    forward_only: bool = True
    """Build no optimizer and keep no gradients."""

    ulysses_sequence_parallel_size: int = option(
        1, yaml="${oc.select:reward_model.ulysses_sequence_parallel_size,1}", minimum=1
    )


@dataclass(kw_only=True)
class FSDPRewardModelModelConfig(RewardModelModelConfig):
    """The weights of a reward model on FSDP."""

    use_shm: bool = option(False, used_if=never("the weights are read where they are"))
    """Copy the weights to shared memory first, so that many processes read them faster."""

    use_remove_padding: bool = option(False, used_if=never(PACKED.reason))
    """Pack sequences without padding, so that no compute is spent on pad tokens."""

    use_fused_kernels: bool = option(
        False,
        yaml="${actor_rollout_ref.model.use_fused_kernels}",
        used_if=never("a reward model computes no log-probabilities"),
    )
    """Fused kernels; follows the actor's model."""

    fsdp_config: FSDPEngineConfig = option(
        default_factory=FSDPRewardEngineConfig,
        reads=("dtype", "param_offload", "strategy"),
        unread="each rank holds the whole reward model, and does not train it",
        reads_all_if=PRIME,
    )
    """How the model is spread over devices."""

    fused_kernel_options: FusedKernelOptions = option(default_factory=FusedKernelOptions)
    """How the fused log-probability head is computed."""

    tokenizer_path: str | None = option(
        None, used_if=never("the implicit model sees token ids, never text")
    )
    """Accepted for older scripts of the recipe prime."""

    enable_gradient_checkpointing: bool = option(
        True, yaml="${actor_rollout_ref.model.enable_gradient_checkpointing}", used_if=PRIME
    )
    """PRIME: compute activations again in the backward pass; follows the actor's model."""

    ref_path: str | None = option(None, used_if=(PRIME, FROZEN_REFERENCE))
    """PRIME: the model whose log-probabilities are subtracted; null takes `path`."""

    ref_type: str = option("freeze", choices=("freeze", "policy"), used_if=PRIME)
    """PRIME: the reference is a frozen model, or the policy that sampled the responses."""

    update: str = option("before", choices=("before", "after", "reverse", "none"), used_if=PRIME)
    """PRIME: train the model on a batch, then score it (`before`); take the scores of the passes
    that train it, which saves one (`after`); score, then train (`reverse`); or train it not at all
    (`none`)."""

    beta_train: float = option(0.05, above=0, used_if=PRIME)
    """PRIME: a token's reward is beta times its log-ratio to the reference."""

    loss_type: str = option("ce", choices=("ce",), used_if=never("there is one loss"))
    """PRIME: cross-entropy between sigmoid(beta times the sum of log-ratios) and the outcome."""

    optim: FSDPOptimizerConfig = option(default_factory=ImplicitOptimizerConfig, used_if=PRIME)
    """PRIME: the optimizer of the implicit model."""


@dataclass(kw_only=True)
class FSDPRewardModelConfig(RewardModelConfig):
    """A reward model on FSDP, or on one device."""

    _target_: str = "verl.workers.config.FSDPRewardModelConfig"

    model: FSDPRewardModelModelConfig = option(default_factory=FSDPRewardModelModelConfig)

    ulysses_sequence_parallel_size: int = option(
        1,
        minimum=1,
        used_if=When(
            lambda here, run: runs_prime(run),
            "each rank of the reward model scores whole sequences",
        ),
    )
    """Devices that share one sequence; `model.fsdp_config` follows it."""

    mini_batch_size: int = option(
        256,
        yaml="${oc.select:actor_rollout_ref.actor.ppo_mini_batch_size,256}",
        minimum=1,
        used_if=PRIME,
    )
    """PRIME: prompts per optimizer step of the implicit model, over all devices; times `rollout_n`
    gives sequences. Follows the actor."""

    rollout_n: int = option(
        1, yaml="${oc.select:actor_rollout_ref.rollout.n,1}", minimum=1, used_if=PRIME
    )
    """PRIME: responses per prompt; follows `rollout.n`."""

    prime_granularity: str = option("token", choices=("token", "whole"), used_if=PRIME)
    """PRIME: reward each token, or the last one with the sum over all."""

    prime_norm: str = option("batch_norm", choices=("batch_norm", "none"), used_if=PRIME)
    """PRIME: divide token rewards by the largest absolute sum over the rest of a response in the
    batch, or leave them at beta times the log-ratio."""


@dataclass(kw_only=True)
class McoreRewardEngineConfig(FollowingMcoreEngineConfig):
    """The reward model's Megatron."""

    use_distributed_optimizer: bool = False
    """There is no optimizer to shard."""

    forward_only: bool = True
    """Build no optimizer and keep no gradients."""


MEGATRON_SCORING = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "sequence_parallel",
    "override_transformer_config",
    "param_offload",
    "dtype",
    "strategy",
    "use_mbridge",
    "vanilla_mbridge",
    "use_remove_padding",
    "override_mcore_model_config",
    "use_dist_checkpointing",
    "dist_checkpointing_path",
    "dist_checkpointing_prefix",
)
"""What is read where a model only scores, or has a rule of its own that says why not."""


@dataclass(kw_only=True)
class McoreRewardModelConfig(RewardModelConfig):
    """A reward model on Megatron."""

    _target_: str = "verl.workers.config.McoreRewardModelConfig"

    strategy: str = option("megatron", choices=("megatron",))

    nccl_timeout: int = option(
        600, minimum=1, used_if=never("actor_rollout_ref.nccl_timeout counts")
    )
    """Seconds after which a collective operation counts as hung."""

    load_weight: bool = option(True, absent=RANDOM_WEIGHTS)
    """Load the Hugging Face weights at the start."""

    megatron: McoreEngineConfig = option(
        default_factory=McoreRewardEngineConfig,
        used_if=REWARD_MODEL,
        reads=MEGATRON_SCORING,
        unread="the reward model is not trained",
    )
    """How the model is spread over devices. On the actor's own the sizes must be the actor's."""

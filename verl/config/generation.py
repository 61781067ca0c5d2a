"""The configurations of `main_generation`, which answers a file of prompts, and of `main_eval`,
which scores responses that were generated before.
"""

from dataclasses import dataclass
from typing import Any

from verl.config.base import BaseConfig, When, never, option
from verl.config.model import MtpConfig
from verl.config.profiler import ProfilerConfig
from verl.config.reward import CustomRewardFunctionConfig
from verl.config.rollout import RolloutConfig
from verl.config.serving import PrometheusConfig
from verl.config.trainer import DEVICES, RayKwargsConfig

READ_BY_ENGINES = (
    *("name", "python", "dtype", "load_format", "prompt_length", "response_length"),
    *("temperature", "top_k", "top_p", "repetition_penalty", "do_sample", "ignore_eos"),
    *("gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens", "max_model_len"),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "data_parallel_size"),
    *("expert_parallel_size", "enforce_eager", "cudagraph_capture_sizes", "scheduling_policy"),
    *("enable_chunked_prefill", "enable_prefix_caching", "enable_sleep_mode", "logprobs_mode"),
    *("multi_stage_wake_up", "disable_log_stats", "limit_images", "server", "engine_kwargs"),
)
"""Keys of the rollout section that matter where nothing is trained."""


@dataclass(kw_only=True)
class GenerationTrainerConfig(BaseConfig):
    """Where to run."""

    nnodes: int = option(1, minimum=1)
    """Machines; with more than one their engines are started through Ray."""

    n_gpus_per_node: int = option(8, minimum=1)
    """Devices of each machine, on a CPU engine processes. Every
    `rollout.tensor_model_parallel_size` of them run an engine, and the engines share the batches;
    there are never more engines than batches."""

    device: str = option("auto", choices=DEVICES)
    """Device to run on; `auto` takes a GPU or NPU if there is one."""

    controller: str = option("auto", choices=("auto", "local", "ray"))
    """Where engines run: `local` in processes of this machine, `ray` on machines of a Ray cluster;
    `auto` is local on one machine and Ray on several."""

    dry_run: bool = False
    """Check the configuration, print the plan and stop."""


@dataclass(kw_only=True)
class GenerationDataConfig(BaseConfig):
    """Prompts to answer."""

    path: str = "~/data/rlhf/math/test.parquet"
    """Parquet file with the prompts."""

    prompt_key: str = "prompt"
    """Column with the prompt."""

    image_key: str = "images"
    """Column with images; `<image>` in the prompt marks where each belongs."""

    mm_processor_kwargs: dict[str, Any] = option(default_factory=dict)
    """More keyword arguments for the model's image processor, for example `size`."""

    n_samples: int = option(5, minimum=1)
    """Responses per prompt. At temperature 0 all would be equal, so it must be 1."""

    output_path: str = "/opt/tiger/math_Qwen2-7B-Instruct.parquet"
    """File to write: the input with a column `responses`."""

    batch_size: int = option(128, minimum=1)
    """Prompts handed to an engine at a time. A finished batch is kept on disk, so that a run that
    was stopped goes on behind it."""

    seed: int = 0
    """Each response is drawn with a seed made of this, its row and its number: a repeated or
    resumed run gives the same responses."""

    overwrite: bool = False
    """Replace an output file, or unfinished results beside it, that other settings have made.
    Without it the command refuses and says what differs."""

    chat_template: str | None = None
    """Chat template in place of the tokenizer's: `chatml`, or Jinja text."""

    apply_chat_template_kwargs: dict[str, Any] = option(default_factory=dict)
    """More keyword arguments for `apply_chat_template`, for example `enable_thinking`."""


@dataclass(kw_only=True)
class GenerationModelConfig(BaseConfig):
    """The model that answers."""

    path: str = "~/models/Qwen2-7B-Instruct"
    """Hugging Face name or folder of the weights."""

    external_lib: str | list[str] | None = None
    """Modules to import before the model is loaded, for example to register its class."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for authors you trust."""


@dataclass(kw_only=True)
class GenerationPrometheusConfig(PrometheusConfig):
    """Metrics of the servers for Prometheus."""

    enable: bool = option(False, used_if=never("the model server always answers GET /metrics"))

    served_model_name: str | None = option(
        "~/models/Qwen2-7B-Instruct", yaml="${oc.select:model.path,null}"
    )


@dataclass(kw_only=True)
class GenerationRolloutConfig(RolloutConfig):
    """The rollout section with values for generation alone."""

    top_k: int = option(50, minimum=-1)

    top_p: float = option(0.7, above=0, maximum=1)

    prompt_length: int = option(1536, minimum=1)
    """Most tokens in a prompt."""

    response_length: int = option(512, minimum=1)
    """Most tokens in a response."""

    dtype: str = "bfloat16"
    """Number format of the engine's weights and activations. Unless you set it, a CPU computes in
    float32."""

    max_num_seqs: int = option(1024, minimum=1)

    load_format: str = "auto"
    """Where weights come from: `auto` or `safetensors` reads the disk."""

    log_prob_micro_batch_size_per_gpu: int | None = option(8, minimum=1)
    """Not used: nothing is trained."""

    log_prob_use_dynamic_bsz: bool = False
    """Not used: nothing is trained."""

    log_prob_max_token_len_per_gpu: int = option(16384, minimum=1)
    """Not used: nothing is trained."""

    mtp: MtpConfig | None = None
    """Heads that predict several tokens ahead; null uses none."""

    prometheus: PrometheusConfig = option(default_factory=GenerationPrometheusConfig)
    """Metrics of the servers for Prometheus."""

    profiler: ProfilerConfig = option(default_factory=ProfilerConfig)
    """Profiling."""


@dataclass(kw_only=True)
class GenerationShardingConfig(BaseConfig):
    """Accepted for older scripts; the engine spreads the model itself."""

    fsdp_size: int = option(-1, minimum=-1)
    """Devices that share one copy of the weights; -1 takes all."""

    forward_prefetch: bool = False
    """Gather the next layer's weights while the current layer computes."""


@dataclass(kw_only=True)
class GenerationActorConfig(BaseConfig):
    """Accepted for older scripts; nothing is trained."""

    strategy: str = "fsdp"
    """Accepted for older scripts; has no effect."""

    ulysses_sequence_parallel_size: int = option(1, minimum=1)
    """Accepted for older scripts; has no effect."""

    entropy_from_logits_with_chunking: bool = False
    """Accepted for older scripts; has no effect."""

    entropy_checkpointing: bool = False
    """Accepted for older scripts; has no effect."""

    fsdp_config: GenerationShardingConfig = option(default_factory=GenerationShardingConfig)
    """Accepted for older scripts; has no effect."""


@dataclass(kw_only=True)
class GenerationConfig(BaseConfig):
    """Responses for a file of prompts."""

    data: GenerationDataConfig = option(default_factory=GenerationDataConfig)
    """Prompts to answer."""

    model: GenerationModelConfig = option(default_factory=GenerationModelConfig)
    """The model that answers."""

    rollout: GenerationRolloutConfig = option(
        default_factory=GenerationRolloutConfig,
        reads=READ_BY_ENGINES,
        unread="an engine that only generates does not read it",
    )
    """Generation."""

    trainer: GenerationTrainerConfig = option(default_factory=GenerationTrainerConfig)
    """Where to run."""

    actor: GenerationActorConfig = option(
        default_factory=GenerationActorConfig, used_if=never("nothing is trained")
    )
    """Accepted for older scripts; nothing is trained."""

    ray_kwargs: RayKwargsConfig = option(
        default_factory=RayKwargsConfig,
        used_if=When(
            lambda here, run: run.trainer.nnodes > 1 or run.trainer.controller == "ray",
            "engines are processes of this machine",
        ),
    )
    """Ray, where it is used."""


@dataclass(kw_only=True)
class EvaluationDataConfig(BaseConfig):
    """Responses to score."""

    path: str = "/tmp/math_Qwen2-7B-Instruct.parquet"
    """Parquet file with the responses."""

    prompt_key: str = "prompt"
    """Column with the prompt."""

    response_key: str = "responses"
    """Column with the list of responses to the prompt."""

    data_source_key: str = "data_source"
    """Column whose value chooses the reward function and groups the scores."""

    reward_model_key: str = "reward_model"
    """Column with the answer, as `{ground_truth: ...}`."""

    output_path: str | None = None
    """File for the result as JSON; null writes none."""


@dataclass(kw_only=True)
class GradingConfig(BaseConfig):
    """How responses are graded."""

    controller: str = option("local", choices=("local", "ray"))
    """Where reward functions run: in processes of this machine (`local`) or of a Ray cluster."""

    num_workers: int | None = option(None, minimum=1)
    """Processes, each of which grades one response at a time; null takes one per core of the
    cluster, or here `ray_kwargs.ray_init.num_cpus` or else one per core."""

    timeout_seconds: float = option(60.0, above=0)
    """Longest time for one response; then the process is killed and the response has no score."""

    pass_threshold: float = 1.0
    """A response passes (pass@k) when its `acc`, or its score where the function reports no `acc`,
    is at least this."""


@dataclass(kw_only=True)
class EvaluationTrainerConfig(BaseConfig):
    """How to run."""

    dry_run: bool = False
    """Check the configuration and the file, print the plan and stop."""


@dataclass(kw_only=True)
class EvaluationConfig(BaseConfig):
    """Scoring responses that were generated before."""

    trainer: EvaluationTrainerConfig = option(default_factory=EvaluationTrainerConfig)
    """How to run."""

    data: EvaluationDataConfig = option(default_factory=EvaluationDataConfig)
    """Responses to score."""

    grading: GradingConfig = option(default_factory=GradingConfig)
    """How responses are graded."""

    custom_reward_function: CustomRewardFunctionConfig = option(
        default_factory=CustomRewardFunctionConfig
    )
    """A reward function of your own."""

    ray_kwargs: RayKwargsConfig = option(default_factory=RayKwargsConfig)
    """Ray, where it is used."""

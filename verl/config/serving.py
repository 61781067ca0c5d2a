"""What the rollout and the reward model share: a language model served by an inference engine.

`ServingConfig` is the engine itself. The small sections around it say how requests are sent,
how weights arrive, and what is reported.
"""

from dataclasses import dataclass
from typing import Any

from verl.config.base import Absent, BaseConfig, When, never, option, while_on
from verl.config.roles import (
    FOREIGN_ENGINE,
    OWN_PROCESS,
    SGLANG_SERVER,
    is_training,
    rollout_traits,
)


@dataclass(kw_only=True)
class ServingConfig(BaseConfig):
    """An inference engine and its memory and parallelism."""

    name: str = option(
        "native",
        absent=Absent(
            "there is no adapter for TensorRT-LLM: use native, vllm or sglang", ("trtllm",)
        ),
    )
    """Engine: `native` is built in and needs nothing installed; `native_process` is the same in a
    process of its own; `vllm`, `sglang`, `hf` (plain `generate`, for debugging), or a registered
    name."""

    python: str | None = option(None, used_if=OWN_PROCESS)
    """Python interpreter that runs a foreign engine, so that it may live in an environment of its
    own; null takes the trainer's."""

    dtype: str = option(
        "bfloat16",
        used_if=When(
            lambda here, run: rollout_traits(here.name).has_own_process or not is_training(run),
            "the built-in engine computes in the format that is trained in",
        ),
    )
    """Number format of the engine's weights and activations."""

    gpu_memory_utilization: float = option(0.5, above=0, maximum=1)
    """Part of the GPU's memory for the engine: its weights, if it has its own, and its KV cache. If
    that is too small for `max_num_seqs` sequences of full length, the built-in engine lets them
    share it in pages: as many run at once as their real lengths allow."""

    enforce_eager: bool = option(True, used_if=FOREIGN_ENGINE)
    """Run vLLM or SGLang without CUDA graphs. The built-in engine always uses graphs on a GPU."""

    cudagraph_capture_sizes: list[int] | None = option(None, used_if=FOREIGN_ENGINE)
    """Batch sizes for which graphs are captured; null lets the engine choose."""

    free_cache_engine: bool = True
    """Free the engine's KV cache while the model trains."""

    tensor_model_parallel_size: int = option(1, minimum=1)
    """Devices that share each weight matrix of one engine."""

    data_parallel_size: int = option(
        1,
        minimum=1,
        absent=Absent(
            "an engine holds one copy of the model, and more copies are more engines: set it to 1"
        ),
    )
    """Copies of the weights inside one engine."""

    expert_parallel_size: int = option(
        1,
        minimum=1,
        used_if=When(
            lambda here, run: rollout_traits(here.name).is_divisible,
            "this engine is not divided among devices",
        ),
    )
    """Devices over which experts are spread: 1, or `tensor_model_parallel_size` times
    `data_parallel_size`. With 1 every device has a part of each expert."""

    max_num_batched_tokens: int = option(8192, minimum=1)
    """Most tokens in one step of the engine."""

    max_model_len: int | None = option(None, minimum=1, used_if=FOREIGN_ENGINE)
    """Longest prompt plus response; null takes `prompt_length` plus `response_length`."""

    max_num_seqs: int = option(256, minimum=1)
    """Most sequences generated at the same time."""

    enable_chunked_prefill: bool = option(True, used_if=FOREIGN_ENGINE)
    """Cut long prompts into pieces, so that they do not stall running sequences."""

    enable_prefix_caching: bool = option(True, used_if=FOREIGN_ENGINE)
    """Keep the KV cache of prompts that sequences share."""

    load_format: str = "auto"
    """Where weights come from: `auto` or `safetensors` reads the disk, `dummy` waits for the
    trainer to send them."""

    disable_log_stats: bool = option(True, used_if=FOREIGN_ENGINE)
    """Do not have the engine log its statistics; what Prometheus gets does not depend on it."""

    skip_tokenizer_init: bool = option(True, used_if=never("engines always take token ids"))
    """Give the engine token ids only, so that it needs no tokenizer."""

    limit_images: int | None = option(None, minimum=0)
    """Most images in one prompt, those of earlier turns included; null sets no limit."""

    prompt_length: int = option(512, minimum=1)
    """Most tokens in a prompt."""

    response_length: int = option(512, minimum=1)
    """Most tokens in a response."""


@dataclass(kw_only=True)
class SamplingConfig(BaseConfig):
    """How tokens are drawn."""

    _target_: str = "verl.workers.config.SamplingConfig"

    temperature: float = option(
        1.0,
        minimum=0,
        used_if=while_on("do_sample"),
    )
    """Sampling temperature; 0 always takes the likeliest token."""

    top_k: int = option(
        -1,
        minimum=-1,
        used_if=while_on("do_sample"),
    )
    """Draw from this many likeliest tokens; -1 (or 0) from all."""

    top_p: float = option(
        1.0,
        above=0,
        maximum=1,
        used_if=while_on("do_sample"),
    )
    """Draw from the likeliest tokens that together have this probability."""

    do_sample: bool = True
    """Draw at random. Off is greedy, whatever the temperature."""

    n: int = option(1, minimum=1)
    """Responses per prompt."""


@dataclass(kw_only=True)
class ServerConfig(BaseConfig):
    """Requests to an engine that has a process of its own."""

    _target_: str = "verl.workers.config.ServerConfig"

    host: str = option("127.0.0.1", used_if=never("only main_generation_server listens"))
    """Address on which `main_generation_server` listens; the default is reachable from this machine
    only."""

    port: int = option(
        8000,
        minimum=0,
        maximum=65535,
        used_if=never("only main_generation_server listens"),
    )
    """Port on which it listens; 0 takes a free one."""

    allowed_local_media_path: str | None = option(
        None, used_if=never("only main_generation_server reads images of clients")
    )
    """Folder below which clients of `main_generation_server` may name image files (`file://...`);
    null allows images in `data:` URLs only."""

    timeout: float = option(60.0, above=0, used_if=SGLANG_SERVER)
    """Seconds until a request counts as failed."""

    max_attempts: int = option(3, minimum=1)
    """Times a request is sent before giving up; it is sent again when its engine was lost."""

    retry_delay: float = option(2.0, minimum=0, used_if=SGLANG_SERVER)
    """Seconds before a request is sent again."""

    max_connections: int = option(1000, minimum=1, used_if=SGLANG_SERVER)
    """Most open connections."""

    max_start_wait_time: float = option(300.0, above=0)
    """Seconds to wait for the engine to start."""


@dataclass(kw_only=True)
class PrometheusConfig(BaseConfig):
    """Metrics of the run and its rollout engines for Prometheus."""

    _target_: str = "verl.workers.config.PrometheusConfig"

    enable: bool = False
    """Serve `/metrics` of the trainer and of the rollout engines on this machine, and write
    `prometheus/prometheus.yml` and a token for Prometheus beside the checkpoints."""

    port: int = option(9090, minimum=1, maximum=65535, used_if=while_on("enable"))
    """Port of the Prometheus server on this machine, which is told to read `file` again."""

    file: str = option(
        "/tmp/ray/session_latest/metrics/prometheus/prometheus.yml", used_if=while_on("enable")
    )
    """Configuration of that server. If the file exists and is yours, the run adds itself to it."""

    metrics_port: int = option(0, minimum=0, maximum=65535, used_if=while_on("enable"))
    """Port of `/metrics`; 0 takes a free one."""

    served_model_name: str | None = option(
        "~/models/deepseek-llm-7b-chat",
        yaml="${oc.select:actor_rollout_ref.model.path,null}",
        used_if=while_on("enable"),
    )
    """Name of the model in the metrics; follows `model.path`."""


@dataclass(kw_only=True)
class CheckpointEngineConfig(BaseConfig):
    """How new weights travel from the trainer to the rollout."""

    _target_: str = "verl.workers.config.CheckpointEngineConfig"

    backend: str = option(
        "naive", used_if=never("weights travel through shared memory, or over TCP between machines")
    )
    """`naive` within a process, `nccl`, `hccl` or `nixl` between machines, or a registered name."""

    update_weights_bucket_megabytes: int = option(2048, minimum=1)
    """Weights are sent in buckets of this many megabytes."""

    engine_kwargs: dict[str, Any] = option(
        default_factory=dict,
        used_if=never("weights travel through shared memory, or over TCP between machines"),
    )
    """Keyword arguments for each back-end, by its name."""

"""From `RolloutConfig` to the plain values that start SGLang's server.

This is the trainer's side: nothing here imports SGLang, and what comes out is JSON, because the
engine may run under another Python. What SGLang itself thinks of a value, it says there.
"""

from pathlib import Path
from typing import Any

from verl.config.rollout import RolloutConfig
from verl.config.serving import ServerConfig
from verl.utils.user_files import read_json_object
from verl.workers.rollout.engine_options import (
    CPU_VARIABLES,
    end_tokens,
    load_format,
    number_formats,
    own_arguments,
    refuse_copies,
)

SERVER = ("-m", "sglang.launch_server")

RESERVED_POSITIONS = 8
"""SGLang keeps the last few positions of its context for itself; it is given so many more."""

STREAM_INTERVAL = 8
"""Tokens per message of a running sample: each costs our side about a tenth of a millisecond."""

KV_TOKENS_ON_CPU = 1 << 17
"""SGLang would take a share of the whole machine's memory; `engine_kwargs.sglang` may say more."""


def sglang_options(
    rollout: RolloutConfig,
    model_path: str,
    *,
    device: str,
    dtype: str = "float32",
    seed: int = 0,
    trust_remote_code: bool = False,
    has_weights: bool = False,
    adapter: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """What `hosted.build` takes. `dtype` is that of the weights that are sent.

    With `adapter`, the contents of an `adapter_config.json`, base weights are read from disk and
    updates bring the tensors of that LoRA adapter alone.
    """
    refuse_what_sglang_cannot(rollout)
    model = read_json_object(Path(model_path) / "config.json")
    model |= model.get("text_config", {})  # where the language model is one part of several
    max_model_len = rollout.max_model_len or rollout.prompt_length + rollout.response_length
    arguments = {
        "model_path": model_path,
        "trust_remote_code": trust_remote_code,
        "random_seed": seed,
        "load_format": load_format(rollout, has_weights or adapter is not None),
        "context_length": max_model_len + RESERVED_POSITIONS,
        **batching(rollout),
        **number_formats(rollout, device, dtype),
        **platform(rollout, device, max_model_len),
        **({} if adapter is None else lora_arguments(adapter)),
    }
    return {
        "command": list(SERVER),
        "arguments": arguments,
        "engine_kwargs": own_arguments(rollout, "sglang"),
        "environment": environment(device, max_model_len, model),
        "server": server_settings(rollout.server),
        "multi_stage_wake_up": rollout.multi_stage_wake_up,
        "prompt_length": rollout.prompt_length,
        "max_model_len": max_model_len,
        "vocabulary": model["vocab_size"],
        "end_tokens": end_tokens(Path(model_path), trust_remote_code),
        "seed": seed,
        "adapter": adapter,
    }


def batching(rollout: RolloutConfig) -> dict[str, Any]:
    """What runs together, and on how many devices."""
    prefill = rollout.max_num_batched_tokens if rollout.enable_chunked_prefill else -1
    arguments: dict[str, Any] = {
        "max_running_requests": rollout.max_num_seqs,
        "max_prefill_tokens": rollout.max_num_batched_tokens,
        "chunked_prefill_size": prefill,
        "disable_radix_cache": not rollout.enable_prefix_caching,
        "disable_cuda_graph": rollout.enforce_eager,
        "stream_interval": STREAM_INTERVAL,
        "log_level": "warning" if rollout.disable_log_stats else "info",
        "tp_size": rollout.tensor_model_parallel_size,
        "pp_size": rollout.pipeline_model_parallel_size,
        "ep_size": rollout.expert_parallel_size,
    }
    if rollout.cudagraph_capture_sizes is not None:
        arguments["cuda_graph_bs_decode"] = list(rollout.cudagraph_capture_sizes)
    if rollout.limit_images is not None:
        arguments["limit_mm_data_per_request"] = {"image": rollout.limit_images}
    return arguments


def server_settings(server: ServerConfig) -> dict[str, Any]:
    return {
        "timeout": server.timeout,
        "max_attempts": server.max_attempts,
        "retry_delay": server.retry_delay,
        "max_connections": server.max_connections,
        "max_start_wait_time": server.max_start_wait_time,
    }


def refuse_what_sglang_cannot(rollout: RolloutConfig) -> None:
    """What the user asked for and would silently not get."""
    refuse_copies(rollout)
    for name, reason, is_set in (
        (
            "mtp.enable_rollout",
            "the trainer sends no weights of the heads that draft",
            rollout.mtp is not None and rollout.mtp.enable_rollout,
        ),
        (
            "enable_rollout_routing_replay",
            "experts are not returned by this protocol",
            rollout.enable_rollout_routing_replay,
        ),
        (
            "quantization_config_file",
            "its server has arguments instead (engine_kwargs.sglang)",
            rollout.quantization_config_file is not None,
        ),
    ):
        if is_set:
            raise ValueError(
                f"rollout.{name} has no effect with rollout.name=sglang: {reason}; remove it"
            )


def platform(rollout: RolloutConfig, device: str, max_model_len: int) -> dict[str, Any]:
    """What depends on the device. On a CPU, SGLang's own choices need a special build of it."""
    if device == "cpu":
        wanted = rollout.max_num_seqs * (max_model_len + RESERVED_POSITIONS)
        return {
            "device": "cpu",
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "disable_overlap_schedule": True,
            "max_total_tokens": max(
                min(wanted, KV_TOKENS_ON_CPU), max_model_len + RESERVED_POSITIONS
            ),
            "mem_fraction_static": rollout.gpu_memory_utilization,
        }
    return {
        "mem_fraction_static": rollout.gpu_memory_utilization,
        "enable_memory_saver": rollout.free_cache_engine,
    }


def lora_arguments(adapter: dict[str, Any]) -> dict[str, Any]:
    modules = adapter["target_modules"]
    return {
        "enable_lora": True,
        "max_loras_per_batch": 1,
        "max_lora_rank": adapter["r"],
        "lora_target_modules": ["all"] if isinstance(modules, str) else list(modules),
    }


def environment(device: str, max_model_len: int, model: dict[str, Any]) -> dict[str, str]:
    """Variables of the server's process."""
    variables: dict[str, str] = {}
    longest = {"max_position_embeddings": None, **model}["max_position_embeddings"]
    if longest is not None and max_model_len <= longest < max_model_len + RESERVED_POSITIONS:
        # Only the positions that SGLang never fills lie beyond what the model was made for.
        variables["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    if device == "cpu":
        variables |= {"SGLANG_USE_CPU_ENGINE": "1", **CPU_VARIABLES}
    return variables

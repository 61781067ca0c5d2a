"""From `RolloutConfig` to the plain values that start vLLM.

This is the trainer's side: nothing here imports vLLM, and what comes out is JSON, because the
engine may run under another Python. What vLLM itself thinks of a value, it says there.
"""

from pathlib import Path
from typing import Any

from verl.config.roles import ROLLOUTS
from verl.config.rollout import RolloutConfig
from verl.utils.tokenizer import has_processor
from verl.workers.rollout.engine_options import (
    CPU_VARIABLES,
    end_tokens,
    load_format,
    number_formats,
    own_arguments,
    refuse_copies,
)

KV_CACHE_BYTES_ON_CPU = 1 << 30
"""vLLM would take a share of the whole machine's memory; `engine_kwargs.vllm` may say more."""


def vllm_options(
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
    refuse_copies(rollout)
    arguments = {
        "model": model_path,
        "trust_remote_code": trust_remote_code,
        "seed": seed,
        "load_format": load_format(rollout, has_weights or adapter is not None),
        "max_model_len": rollout.max_model_len or rollout.prompt_length + rollout.response_length,
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": rollout.max_num_batched_tokens,
        "enable_chunked_prefill": rollout.enable_chunked_prefill,
        "enable_prefix_caching": rollout.enable_prefix_caching,
        "enforce_eager": rollout.enforce_eager,
        "scheduling_policy": rollout.scheduling_policy,
        "disable_log_stats": rollout.disable_log_stats,
        "logprobs_mode": rollout.logprobs_mode.removesuffix("_logprobs") + "_logprobs",
        "tensor_parallel_size": rollout.tensor_model_parallel_size,
        "pipeline_parallel_size": rollout.pipeline_model_parallel_size,
        "enable_expert_parallel": rollout.expert_parallel_size > 1,
        **number_formats(rollout, device, dtype),
        **memory(rollout, device),
    }
    if rollout.cudagraph_capture_sizes is not None:
        arguments["cudagraph_capture_sizes"] = list(rollout.cudagraph_capture_sizes)
    if rollout.limit_images is not None:
        arguments["limit_mm_per_prompt"] = {"image": rollout.limit_images}
    if rollout.quantization_config_file is not None:
        arguments["hf_overrides"] = {"quantization_config_file": rollout.quantization_config_file}
    if rollout.enable_rollout_routing_replay:
        arguments["enable_return_routed_experts"] = True
        refuse_routes_of_several_workers(rollout, device)
    if adapter is not None:
        arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": adapter["r"]}
    return {
        "versions": ROLLOUTS["vllm"].versions,
        "arguments": arguments,
        "engine_kwargs": own_arguments(rollout, "vllm"),
        "compiles": device != "cpu" or not rollout.enforce_eager,
        "interprets": device == "cpu" and rollout.enable_rollout_routing_replay,
        "prompt_length": rollout.prompt_length,
        "end_tokens": end_tokens(Path(model_path), trust_remote_code),
        "adapter": adapter,
        "sees": has_processor(model_path),
    }


def refuse_routes_of_several_workers(rollout: RolloutConfig, device: str) -> None:
    size = rollout.tensor_model_parallel_size
    if device == "cpu" and size > 1:
        raise ValueError(
            f"rollout.enable_rollout_routing_replay is True, and tensor_model_parallel_size is "
            f"{size}; on a CPU vLLM returns expert routes with one worker: set it to 1, or "
            "actor.router_replay.mode=R2"
        )


def vllm_environment(device: str) -> dict[str, str]:
    """Variables that must be set before the engine's process imports anything."""
    variables = {"VLLM_NO_USAGE_STATS": "1"}
    if device == "cpu":
        variables |= CPU_VARIABLES
        # The trainer uses the same cores, and vLLM's workers outnumber the memory nodes.
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    return variables


def memory(rollout: RolloutConfig, device: str) -> dict[str, Any]:
    if device == "cpu":
        return {"kv_cache_memory_bytes": KV_CACHE_BYTES_ON_CPU}
    return {
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "enable_sleep_mode": rollout.enable_sleep_mode,
    }

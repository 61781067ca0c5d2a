"""From `RolloutConfig` to the plain values that start vLLM.

This is the trainer's side: nothing here imports vLLM, and what comes out is JSON, because the
engine may run under another Python. What vLLM itself thinks of a value, it says there.
"""

import json
from pathlib import Path
from typing import Any

from verl.config.rollout import RolloutConfig
from verl.utils.tokenizer import hf_tokenizer

KV_CACHE_BYTES_ON_CPU = 1 << 30
"""vLLM would take a share of the whole machine's memory; `engine_kwargs.vllm` may say more."""

LOG_PROB_MODES = ("processed_logprobs", "raw_logprobs")


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
    refuse_what_vllm_cannot(rollout)
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
        "logprobs_mode": rollout.logprobs_mode,
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
    if adapter is not None:
        arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": adapter["r"]}
    return {
        "arguments": arguments,
        "engine_kwargs": own_arguments(rollout),
        "compiles": device != "cpu" or not rollout.enforce_eager,
        "prompt_length": rollout.prompt_length,
        "end_tokens": end_tokens(Path(model_path), trust_remote_code),
        "adapter": adapter,
    }


def vllm_environment(device: str) -> dict[str, str]:
    """Variables that must be set before the engine's process imports anything."""
    variables = {"VLLM_NO_USAGE_STATS": "1"}
    if device == "cpu":
        # AMX that is advertised but cannot run dies with SIGILL.
        variables["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_FP16"
        # The trainer uses the same cores, and vLLM's workers outnumber the memory nodes.
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    return variables


def refuse_what_vllm_cannot(rollout: RolloutConfig) -> None:
    if rollout.data_parallel_size > 1:
        raise ValueError(
            f"rollout.data_parallel_size is {rollout.data_parallel_size}, but one engine holds one "
            "copy of the model; more copies are more engines: set it to 1 and let "
            "rollout.tensor_model_parallel_size divide the devices among engines"
        )
    if rollout.logprobs_mode not in LOG_PROB_MODES:
        raise ValueError(
            f"rollout.logprobs_mode is {rollout.logprobs_mode!r}, which returns logits where "
            f"training needs log-probabilities; it must be one of {', '.join(LOG_PROB_MODES)}"
        )


def load_format(rollout: RolloutConfig, reads_disk: bool) -> str:
    """`dummy` waits for weights that are sent; where none will be, they come from disk."""
    return "auto" if reads_disk and rollout.load_format == "dummy" else rollout.load_format


def number_formats(rollout: RolloutConfig, device: str, dtype: str) -> dict[str, Any]:
    """On a CPU the engine computes in the format that is trained in: most have no fast bf16."""
    is_fp8 = rollout.dtype == "fp8" or rollout.quantization == "fp8"
    computes_in = "bfloat16" if rollout.dtype == "fp8" else rollout.dtype
    formats: dict[str, Any] = {"dtype": dtype if device == "cpu" else computes_in}
    if is_fp8:
        formats["quantization"] = "fp8"
    elif rollout.quantization is not None:
        formats["quantization"] = rollout.quantization
    if rollout.quantization_config_file is not None:
        formats["hf_overrides"] = {"quantization_config_file": rollout.quantization_config_file}
    return formats


def memory(rollout: RolloutConfig, device: str) -> dict[str, Any]:
    if device == "cpu":
        return {"kv_cache_memory_bytes": KV_CACHE_BYTES_ON_CPU}
    return {
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "enable_sleep_mode": rollout.enable_sleep_mode,
    }


def own_arguments(rollout: RolloutConfig) -> dict[str, Any]:
    """`engine_kwargs.vllm` as the user wrote it; null leaves a value as it is."""
    stated = {"vllm": None, **rollout.engine_kwargs}["vllm"] or {}
    return {name: value for name, value in stated.items() if value is not None}


def end_tokens(folder: Path, trust_remote_code: bool) -> list[int]:
    """Every token that ends a response: the model's, its generation config's, the tokenizer's."""
    ids = set[int]()
    for file in ("config.json", "generation_config.json"):
        if (folder / file).is_file():
            stated = json.loads((folder / file).read_text())
            stated |= stated.get("text_config", {})  # where the language model is one of several
            ids.update(as_ids(stated.get("eos_token_id")))
    tokenizer = hf_tokenizer(folder, trust_remote_code=trust_remote_code)
    ids.update(as_ids(tokenizer.eos_token_id))
    return sorted(ids)


def as_ids(stated: Any) -> list[int]:
    """What a file says of end tokens: nothing, one, or several."""
    if stated is None:
        return []
    return [stated] if isinstance(stated, int) else list(stated)

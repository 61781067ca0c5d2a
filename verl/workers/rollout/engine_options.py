"""From `RolloutConfig` and a model's folder to the plain values that start vLLM and SGLang.

This is the trainer's side: nothing here imports an engine, and what comes out is JSON, because the
engine may run under another Python. What the engine itself thinks of a value, it says there.
"""

from pathlib import Path
from typing import Any

from verl.config.roles import ROLLOUTS
from verl.config.rollout import RolloutConfig
from verl.config.serving import ServerConfig
from verl.utils.tokenizer import has_processor, hf_tokenizer
from verl.utils.user_files import read_json_object

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


CPU_VARIABLES = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}
"""AMX that is advertised but cannot run dies with SIGILL."""


def refuse_copies(rollout: RolloutConfig) -> None:
    if rollout.data_parallel_size > 1:
        raise ValueError(
            f"rollout.data_parallel_size is {rollout.data_parallel_size}, but one engine holds one "
            "copy of the model; more copies are more engines: set it to 1 and let "
            "rollout.tensor_model_parallel_size divide the devices among engines"
        )


def load_format(rollout: RolloutConfig, reads_disk: bool) -> str:
    """`dummy` waits for weights that are sent; where none will be, they come from disk."""
    return "auto" if reads_disk and rollout.load_format == "dummy" else rollout.load_format


def number_formats(rollout: RolloutConfig, device: str, dtype: str) -> dict[str, Any]:
    """On a CPU the engine computes in the format that is trained in: most have no fast bf16."""
    is_fp8 = rollout.dtype == "fp8"
    computes_in = "bfloat16" if is_fp8 else rollout.dtype
    formats: dict[str, Any] = {"dtype": dtype if device == "cpu" else computes_in}
    quantization = "fp8" if is_fp8 else rollout.quantization
    if quantization is not None:
        formats["quantization"] = quantization
    return formats


def own_arguments(rollout: RolloutConfig, engine: str) -> dict[str, Any]:
    """`engine_kwargs.<engine>` as the user wrote it; null leaves a value as it is."""
    stated = {engine: None, **rollout.engine_kwargs}[engine] or {}
    return {name: value for name, value in stated.items() if value is not None}


def end_tokens(folder: Path, trust_remote_code: bool) -> list[int]:
    """Every token that ends a response: the model's, its generation config's, the tokenizer's."""
    ids = set[int]()
    for file in ("config.json", "generation_config.json"):
        if (folder / file).is_file():
            stated = read_json_object(folder / file)
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

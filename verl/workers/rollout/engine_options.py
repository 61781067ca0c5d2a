"""What the options of engines in other environments have in common.

From `RolloutConfig` and a model's folder; nothing here imports an engine.
"""

from pathlib import Path
from typing import Any

from verl.config.rollout import RolloutConfig
from verl.utils.tokenizer import hf_tokenizer
from verl.utils.user_files import read_json_object

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

"""Engines for the tests: over our protocol server, or over the real SGLang if one is there."""

import os
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from tests.tiny_models import tiny_model
from tests.tiny_tokenizer import tiny_tokenizer
from verl.config.rollout import RolloutConfig
from verl.config.serving import ServerConfig
from verl.utils.environment import sglang_python
from verl.workers.rollout.base import GenerationRequest, SamplingParams
from verl.workers.rollout.engine_options import sglang_options
from verl.workers.rollout.process.client import EngineProcess, EngineSpec

BUILD = "verl.workers.rollout.sglang_rollout.hosted:build"
PROTOCOL_SERVER = str(Path(__file__).with_name("protocol_server.py"))
PROMPT_LENGTH, RESPONSE_LENGTH = 72, 56
PROMPT = [5, 17, 40, 9, 61]
ADAPTER = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": 2,
    "lora_alpha": 8,
    "lora_dropout": 0.0,
    "bias": "none",
    "target_modules": ["q_proj", "v_proj"],
}


def trained_model(model_type: str = "llama") -> PreTrainedModel:
    """Wide enough heads for SGLang's kernels; the tests' other models are narrower."""
    return tiny_model(model_type, hidden_size=64, intermediate_size=96)


def save_model(folder: Path, model_type: str = "llama") -> str:
    trained_model(model_type).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def rollout_config(**changes: Any) -> RolloutConfig:
    server = ServerConfig(timeout=20.0, retry_delay=0.1, max_start_wait_time=300.0)
    chosen = {
        "name": "sglang",
        "max_num_seqs": 8,
        "prompt_length": PROMPT_LENGTH,
        "response_length": RESPONSE_LENGTH,
        "dtype": "float32",
        "gpu_memory_utilization": 0.05,
        "server": server,
    }
    return RolloutConfig(**{**chosen, **changes})


def engine_options(
    model_path: str, *, is_real: bool = False, own: dict[str, Any] | None = None, **changes: Any
) -> dict[str, Any]:
    """`own` are the user's arguments for the server, `changes` those of `sglang_options`."""
    rollout = changes.pop("rollout", None) or rollout_config()
    options = sglang_options(rollout, model_path, device="cpu", **changes)
    options["engine_kwargs"] = {**options["engine_kwargs"], **(own or {})}
    if not is_real:
        options["command"] = [PROTOCOL_SERVER]
    return options


def start_engine(options: dict[str, Any], *, has_weights: bool = False) -> EngineProcess:
    is_real = options["command"] != [PROTOCOL_SERVER]
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    engine = EngineProcess(
        EngineSpec(
            build=BUILD,
            options=options,
            python=sglang_python() if is_real else None,
            environment=environment,
            has_weights=has_weights,
            start_seconds=300.0,
        )
    )
    engine.start()
    return engine


def ask(
    prompt: list[int] | None = None, *, num_samples: int = 1, seeds: Any = None, **params: Any
) -> GenerationRequest:
    return GenerationRequest(
        request_id=os.urandom(4).hex(),
        prompt_ids=prompt or PROMPT,
        params=SamplingParams(**{"max_tokens": 12, **params}),
        num_samples=num_samples,
        seeds=seeds,
    )


def named_weights(model: PreTrainedModel) -> list[tuple[str, torch.Tensor]]:
    """As a trainer sends them: a tied head is the embedding and travels once."""
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


@torch.no_grad()
def changed(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """The model after an update that nobody can overlook, norms and biases included."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def lora_update(model: PreTrainedModel, seed: int) -> dict[str, torch.Tensor]:
    """Tensors of an adapter, named as peft names them in a model under training."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in model.named_modules():
        if name.endswith(("q_proj", "v_proj")):
            rows, columns = module.weight.shape
            tensors[f"{name}.lora_A.default.weight"] = torch.randn(2, columns, generator=generator)
            tensors[f"{name}.lora_B.default.weight"] = torch.randn(rows, 2, generator=generator)
    return {name: tensor * 0.3 for name, tensor in tensors.items()}


@torch.no_grad()
def merged(model: PreTrainedModel, adapter: dict[str, torch.Tensor]) -> PreTrainedModel:
    """The model with the adapter added to its weights."""
    parameters = dict(model.named_parameters())
    for name, low in adapter.items():
        if ".lora_A." in name:
            high = adapter[name.replace("lora_A", "lora_B")]
            weight = parameters[name.replace(".lora_A.default", "")]
            weight.add_(high @ low * (ADAPTER["lora_alpha"] / ADAPTER["r"]))
    return model

"""Real vLLM processes for the tests, and what Hugging Face's own forward says of their tokens.

They run where the variable VERL_VLLM_PYTHON names an interpreter that has vLLM (`make test-vllm`).
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.tiny_models import plain_twin, tiny_model
from tests.tiny_tokenizer import tiny_tokenizer
from verl.config.rollout import RolloutConfig
from verl.utils.device import get_device_name
from verl.utils.environment import vllm_python
from verl.workers.rollout.base import GenerationRequest, SamplingParams, TokenOutput
from verl.workers.rollout.factory import engine_spec
from verl.workers.rollout.process.client import EngineProcess

needs_vllm = [
    pytest.mark.skipif(vllm_python() is None, reason="VERL_VLLM_PYTHON names no interpreter"),
    pytest.mark.timeout(600),
]

PROMPT = [5, 6, 7, 8, 40, 41]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SHAPE = {"hidden_size": 128, "intermediate_size": 256}
"""Widths for which vLLM has kernels: a head has 32 features."""


def saved_model(folder: Path, model_type: str, **changes: Any) -> PreTrainedModel:
    """A tiny model, also in `folder` with a tokenizer, as if it had been downloaded."""
    model = plain_twin(tiny_model(model_type, scale=0.1, **{**SHAPE, **changes}))
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return model


def rollout_config(**changes: Any) -> RolloutConfig:
    settings: dict[str, Any] = {
        "name": "vllm",
        "python": vllm_python(),
        "prompt_length": 64,
        "response_length": 64,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 256,
        "engine_kwargs": {"vllm": {"kv_cache_memory_bytes": 1 << 26, "block_size": 32}},
    }
    return RolloutConfig(**{**settings, **changes})


def vllm_process(folder: Path, *, has_weights: bool = False, **changes: Any) -> EngineProcess:
    """Not started yet. Buckets are small, so that tensors span several of them."""
    config = rollout_config(**{"dtype": "float32", **changes})
    spec = engine_spec(config, str(folder), device=get_device_name(), has_weights=has_weights)
    return EngineProcess(replace(spec, bucket_bytes=16 << 10))


def weights_of(model: PreTrainedModel) -> Iterable[tuple[str, Tensor]]:
    return [(name, weight.detach()) for name, weight in model.named_parameters()]


@torch.no_grad()
def train_a_little(model: PreTrainedModel) -> None:
    """Change every weight visibly."""
    for weight in model.parameters():
        weight.add_(0.03 * torch.randn_like(weight))


def generate(
    engine: EngineProcess, params: SamplingParams, prompt: list[int] = PROMPT, **options: Any
) -> list[TokenOutput]:
    request = GenerationRequest(request_id="r", prompt_ids=prompt, params=params, **options)
    (samples,) = engine.generate_batch([request])
    return samples


@torch.no_grad()
def reference_log_probs(
    model: PreTrainedModel,
    output: TokenOutput,
    temperature: float = 1.0,
    prompt: list[int] = PROMPT,
) -> Tensor:
    """(T, V): what the model itself says at each place of the response."""
    ids = torch.tensor([[*prompt, *output.token_ids]])
    logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
    return (logits / temperature).log_softmax(-1)


def assert_greedy_as(model: PreTrainedModel, engine: EngineProcess) -> None:
    """The engine takes the model's likeliest tokens, with the model's log-probabilities."""
    (output,) = generate(engine, GREEDY)
    reference = reference_log_probs(model, output)
    assert output.token_ids == reference.argmax(-1).tolist()
    assert len(output.token_ids) == GREEDY.max_tokens
    drawn = reference[torch.arange(len(output.token_ids)), output.token_ids]
    torch.testing.assert_close(torch.tensor(output.log_probs), drawn, rtol=0, atol=1e-4)

"""Short ways to build engines and requests, and the log-probabilities that training computes."""

from typing import Any

import torch
from transformers import PreTrainedModel

from tests.tiny_models import tiny_model
from verl.models.forward import hidden_states, packed_layout, packed_positions
from verl.models.head import OutputHead, token_log_probs
from verl.workers.rollout.base import GenerationRequest, SamplingParams
from verl.workers.rollout.native.engine import EngineLimits, NativeEngine

EOS = 2
LIMITS = EngineLimits(max_num_seqs=8, max_prompt_tokens=12, max_response_tokens=16)


def build_engine(
    model: PreTrainedModel | None = None, limits: EngineLimits = LIMITS, **options: Any
) -> NativeEngine:
    return NativeEngine(model or tiny_model("llama"), limits, eos_token_ids=[EOS], **options)


def request(
    prompt_ids: list[int], params: SamplingParams, request_id: str = "r", **options: Any
) -> GenerationRequest:
    return GenerationRequest(request_id=request_id, prompt_ids=prompt_ids, params=params, **options)


@torch.no_grad()
def training_log_probs(
    model: PreTrainedModel, prompt: list[int], response: list[int], temperature: float = 1.0
) -> torch.Tensor:
    ids = torch.tensor(prompt + response, device=model.device)
    layout = packed_layout(model, [len(ids)])
    positions = packed_positions([len(ids)]).to(model.device)
    hidden = hidden_states(model, ids, positions, layout)
    log_probs, _ = token_log_probs(
        hidden[:-1], OutputHead.of(model), ids[1:], temperature=temperature
    )
    return log_probs[len(prompt) - 1 :]


def assert_nothing_is_left(engine: NativeEngine) -> None:
    with engine.paused():
        scheduler = engine.core.scheduler
        assert not scheduler.waiting
        assert not scheduler.groups
        assert not scheduler.rows

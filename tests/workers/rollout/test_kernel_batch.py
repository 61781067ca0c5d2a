"""The engine through kernels gives what it gives in plain torch, token for token."""

import pytest
import torch

from tests.models.kernels.devices import on_each_device
from tests.tiny_models import tiny_model
from tests.workers.rollout.helpers import assert_nothing_is_left
from verl.workers.rollout.base import GenerationRequest, SamplingParams
from verl.workers.rollout.native.engine import EngineLimits, NativeEngine
from verl.workers.rollout.native.running_batch import RunningBatch

LIMITS = EngineLimits(
    max_num_seqs=6, max_prompt_tokens=6, max_response_tokens=14, steps_per_visit=3
)
SETTINGS = {
    "sampling": {},
    "greedy": {"temperature": 0.0},
    "filters": {"temperature": 0.8, "top_k": 5, "repetition_penalty": 1.2},
}


def outputs(model, params, plain):
    engine = NativeEngine(model, LIMITS, eos_token_ids=[1])
    if plain:
        engine.batch = RunningBatch(engine.runner, LIMITS)
        engine.cache = engine.batch.cache
    generator = torch.Generator().manual_seed(3)
    requests = [
        GenerationRequest(
            request_id=str(i),
            # The last prompt is longer than its slot, and goes on in the rows' own.
            prompt_ids=torch.randint(3, 50, (2 + 2 * i,), generator=generator).tolist(),
            params=SamplingParams(max_tokens=4 + 3 * i % 7, seed=i, **params),
            num_samples=1 + i % 3,
        )
        for i in range(4)
    ]
    result = engine.generate_batch(requests)
    assert_nothing_is_left(engine)
    return type(engine.batch).__name__, [output for group in result for output in group]


@on_each_device
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("architecture", ["qwen2", "gemma2"])
def test_responses_are_those_of_plain_torch(device, architecture, name):
    model = tiny_model(architecture).to(device)
    plain_class, expected = outputs(model, SETTINGS[name], plain=True)
    kernel_class, found = outputs(model, SETTINGS[name], plain=False)
    assert (plain_class, kernel_class) == ("RunningBatch", "KernelBatch")
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.stop_reason == theirs.stop_reason
        assert ours.log_probs == pytest.approx(theirs.log_probs, abs=2e-5)


@pytest.mark.gpu
def test_graphs_stay_valid_when_memory_was_given_back_and_weights_have_changed():
    model = tiny_model("llama").cuda()
    engine = NativeEngine(model, LIMITS, eos_token_ids=[])
    params = SamplingParams(max_tokens=9, temperature=0.0)
    request = GenerationRequest(request_id="a", prompt_ids=[5, 6, 7], params=params)
    before = engine.generate_batch([request])[0][0].token_ids
    held = engine.cache.num_bytes
    assert held > 0
    engine.sleep()
    assert engine.cache.num_bytes == 0
    assert engine.generate_batch([request])[0][0].token_ids == before
    assert engine.cache.num_bytes == held
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3, generator=torch.Generator("cuda").manual_seed(1))
    fresh = NativeEngine(model, LIMITS, eos_token_ids=[])
    expected = fresh.generate_batch([request])[0][0].token_ids
    assert expected != before
    assert engine.generate_batch([request])[0][0].token_ids == expected

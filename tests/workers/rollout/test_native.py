"""The built-in engine: what it generates and the log-probabilities it reports."""

import pytest
import torch

from tests.tiny_models import ARCHITECTURES, plain_twin, tiny_model
from tests.workers.rollout.helpers import EOS, LIMITS, build_engine, request, training_log_probs
from verl.models.exact import make_exact
from verl.workers.rollout.base import SamplingParams
from verl.workers.rollout.native.engine import EngineLimits
from verl.workers.rollout.native.rows import RowTable

PROMPTS = [[5, 6, 7], [9], [11, 12, 13, 14, 15, 16, 17, 18, 19, 20], [30, 31]]
CAPACITY = LIMITS.max_prompt_tokens + LIMITS.max_response_tokens


def requests(params, prompts=PROMPTS, num_samples=1):
    return [
        request(ids, params, str(number), num_samples=num_samples)
        for number, ids in enumerate(prompts)
    ]


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_greedy_output_equals_generate(model_type):
    model = tiny_model(model_type)
    params = SamplingParams(temperature=0, max_tokens=12)
    outputs = build_engine(model).generate_batch(requests(params))
    twin = plain_twin(model)
    for prompt, (output,) in zip(PROMPTS, outputs, strict=True):
        expected = twin.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=EOS,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        assert output.token_ids == expected


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_log_probs_equal_those_of_the_training_pass(model_type):
    model = tiny_model(model_type, scale=0.02)
    params = SamplingParams(temperature=0.8, max_tokens=14, seed=4, top_p=0.9, log_probs="raw")
    outputs = build_engine(model).generate_batch(requests(params, num_samples=2))
    for prompt, samples in zip(PROMPTS, outputs, strict=True):
        for output in samples:
            expected = training_log_probs(model, prompt, output.token_ids, 0.8)
            torch.testing.assert_close(torch.tensor(output.log_probs), expected, rtol=0, atol=1e-6)


def test_attention_sinks_belong_to_their_heads():
    model = tiny_model("gpt_oss", num_attention_heads=6, num_key_value_heads=2)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.copy_(torch.linspace(-3, 3, 6))
    params = SamplingParams(max_tokens=8, seed=4)
    (output,) = build_engine(model).generate_batch(requests(params, PROMPTS[:1]))[0]
    expected = training_log_probs(model, PROMPTS[0], output.token_ids)
    torch.testing.assert_close(torch.tensor(output.log_probs), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "model_type",
    [
        *("llama", "qwen2", "qwen3", "gemma2", "mistral", "phi", "olmo2"),
        *("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"),
    ],
)
def test_in_exact_mode_log_probs_are_bit_equal_to_the_training_pass(model_type):
    model = make_exact(tiny_model(model_type), CAPACITY)
    params = SamplingParams(temperature=0.8, max_tokens=16, seed=4)
    outputs = build_engine(model).generate_batch(requests(params, num_samples=3))
    for prompt, samples in zip(PROMPTS, outputs, strict=True):
        for output in samples:
            expected = training_log_probs(model, prompt, output.token_ids, 0.8)
            assert torch.equal(torch.tensor(output.log_probs), expected)


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "gpt_oss"])
def test_a_prompt_longer_than_its_slot_goes_on_in_the_slot_of_the_response(model_type):
    model = tiny_model(model_type, scale=0.02)
    limits = EngineLimits(max_num_seqs=4, max_prompt_tokens=4, max_response_tokens=16)
    prompt = PROMPTS[2]  # ten tokens: six of them in the response slot, so ten are left
    params = SamplingParams(max_tokens=100, seed=1, ignore_eos=True)
    (samples,) = build_engine(model, limits).generate_batch(
        [request(prompt, params, num_samples=3)]
    )
    for output in samples:
        assert len(output.token_ids) == 10
        assert output.stop_reason == "length"
        expected = training_log_probs(model, prompt, output.token_ids)
        torch.testing.assert_close(torch.tensor(output.log_probs), expected, rtol=0, atol=1e-6)
    ample = build_engine(model).generate_batch([request(prompt, params, num_samples=3)])[0]
    assert [output.token_ids for output in samples] == [o.token_ids[:10] for o in ample]


def test_an_exact_model_with_less_capacity_than_the_engine_is_refused():
    with pytest.raises(ValueError, match="capacity 20"):
        build_engine(make_exact(tiny_model("llama"), 20))


def test_generation_leaves_no_gradient_and_the_module_in_its_mode():
    model = tiny_model("llama")
    build_engine(model).generate_batch(requests(SamplingParams(max_tokens=3)))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model.training


def test_rows_of_a_graph_that_nobody_uses_are_at_a_position_that_exists(monkeypatch):
    runner = build_engine(tiny_model("gpt2")).core.runner
    seen = []
    monkeypatch.setattr(
        runner, "_hidden_states", lambda ids, positions, layout: seen.append(positions)
    )
    runner.decode_hidden(None, RowTable.empty(3, 2, torch.device("cpu")))
    assert seen[0].tolist() == [0, 0, 0]

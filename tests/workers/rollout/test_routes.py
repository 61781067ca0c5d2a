"""Expert routes that the built-in engine returns are those of the training pass."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.tiny_models import tiny_model
from tests.tiny_tokenizer import tiny_tokenizer
from tests.workers.rollout.helpers import LIMITS, request
from verl.models.exact import make_exact
from verl.models.forward import hidden_states, packed_layout, packed_positions
from verl.models.routing import Routing
from verl.protocol.padded import Padding, padded_batch
from verl.protocol.trajectory import Segment, Trajectory
from verl.workers.rollout.base import GenerationRequest, SamplingParams, TokenDelta
from verl.workers.rollout.native.engine import NativeEngine
from verl.workers.rollout.process.client import EngineProcess, EngineSpec
from verl.workers.rollout.process.messages import delta_messages, delta_of
from verl.workers.rollout.process.native import BUILD, native_options

CAPACITY = LIMITS.max_prompt_tokens + LIMITS.max_response_tokens
LAST = TokenDelta(
    sample=1, token_ids=(6,), log_probs=(-2.0,), policy_versions=(2,), stop_reason="length"
)
PROMPTS = [[5, 6, 7], [9], [11, 12, 13, 14, 15, 16, 17, 18]]


def engine(model):
    return NativeEngine(model, LIMITS, eos_token_ids=[2], records_routes=True)


def training_routes(model, ids):
    routing = Routing.of(model)
    routing.begin()
    positions = packed_positions([len(ids)])
    hidden_states(model, torch.tensor(ids), positions, packed_layout(model, [len(ids)]))
    return routing.selected(len(ids))


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3"])
def test_in_exact_mode_routers_choose_as_in_the_training_pass(model_type):
    model = make_exact(tiny_model(model_type), CAPACITY)
    params = SamplingParams(max_tokens=12, seed=3)
    requests = [request(ids, params, str(n), num_samples=2) for n, ids in enumerate(PROMPTS)]
    for prompt, samples in zip(PROMPTS, engine(model).generate_batch(requests), strict=True):
        for output in samples:
            ids = prompt + output.token_ids
            assert len(output.routed_experts) == len(ids) - 1, "nobody computed the last token"
            expected = training_routes(model, ids)[:-1]
            assert torch.equal(torch.from_numpy(output.routed_experts).long(), expected)


def test_tokens_known_from_an_earlier_turn_have_their_routes():
    model = make_exact(tiny_model("qwen3_moe"), CAPACITY)
    built, params = engine(model), SamplingParams(max_tokens=4, seed=3)
    first = GenerationRequest(
        request_id="a", prompt_ids=[5, 6, 7], params=params, session_ids=("s",)
    )
    (output,) = built.generate_batch([first])[0]
    ids = [5, 6, 7, *output.token_ids, 20, 21]
    second = GenerationRequest(request_id="b", prompt_ids=ids, params=params, session_ids=("s",))
    before = built.core.num_prefilled_tokens
    (output,) = built.generate_batch([second])[0]
    assert built.core.num_prefilled_tokens - before < len(ids), "some tokens were known"
    expected = training_routes(model, [*ids, *output.token_ids])[:-1]
    assert torch.equal(torch.from_numpy(output.routed_experts).long(), expected)


def test_routes_are_padded_with_their_rows():
    routes = [np.full((n, 2, 2), n, dtype=np.int16) for n in (4, 3)]
    rows = [
        Trajectory(
            uid="u",
            sample=0,
            row={},
            segments=[
                Segment(author="template", token_ids=[5] * prompt),
                Segment(
                    author="model",
                    token_ids=[6] * 3,
                    is_trained=True,
                    parent=0,
                    routed_experts=found,
                ),
            ],
        )
        for prompt, found in zip((2, 1), routes, strict=True)
    ]
    padding = Padding(prompt_length=3, response_length=4, pad_token_id=0)
    column = padded_batch(rows, padding, with_rows=False).batch["routed_experts"]
    assert column.shape == (2, 7, 2, 2)
    assert column[:, :, 0, 1].tolist() == [[1, 4, 4, 4, 4, 1, 1], [1, 1, 3, 3, 3, 1, 1]]


def test_routes_come_back_from_an_engines_process_as_they_were():
    routes = np.arange(24, dtype=np.int16).reshape(4, 3, 2)
    deltas = [
        (7, TokenDelta(sample=0, token_ids=(5,), log_probs=(-1.0,), policy_versions=(2,))),
        (7, replace(LAST, routed_experts=routes)),
        (8, LAST),
    ]
    (message,) = delta_messages(deltas, version=2)
    found = [delta_of(fields)[1] for fields in json.loads(json.dumps(message))["deltas"]]
    assert found[0].routed_experts is None
    assert found[2].routed_experts is None
    assert found[1].routed_experts.dtype == np.int16
    assert np.array_equal(found[1].routed_experts, routes)
    large = replace(LAST, routed_experts=np.zeros((1 << 11, 48, 8), dtype=np.int16))
    assert len(list(delta_messages([(n, large) for n in range(8)], version=2))) == 4


@pytest.mark.slow
def test_an_engine_in_its_own_process_returns_the_routes_of_the_training_pass(tmp_path):
    model = tiny_model("qwen3_moe")
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    hosted = EngineProcess(
        EngineSpec(
            build=BUILD,
            options=native_options(str(tmp_path), LIMITS, exact=True, records_routes=True),
            environment={"OMP_NUM_THREADS": "1"},
            has_weights=True,
        )
    )
    hosted.start()
    try:
        params = SamplingParams(max_tokens=8, seed=3)
        (samples,) = hosted.generate_batch([request(PROMPTS[0], params, "r", num_samples=2)])
    finally:
        hosted.close()
    make_exact(model, CAPACITY)
    for output in samples:
        expected = training_routes(model, PROMPTS[0] + output.token_ids)[:-1]
        assert torch.equal(torch.from_numpy(output.routed_experts.copy()).long(), expected)


def test_a_model_without_experts_has_no_routes_to_record():
    with pytest.raises(ValueError, match="no experts"):
        engine(tiny_model("llama"))

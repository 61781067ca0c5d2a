"""The engine through kernels gives what it gives in plain torch, token for token."""

import dataclasses

import pytest
import torch

from tests.models.kernels.devices import on_each_device
from tests.tiny_models import tiny_model
from tests.workers.rollout.helpers import assert_nothing_is_left, training_log_probs
from verl.workers.rollout.base import GenerationRequest, SamplingParams
from verl.workers.rollout.native.batch import RunningBatch
from verl.workers.rollout.native.engine import EngineLimits, NativeEngine

LIMITS = EngineLimits(
    max_num_seqs=6, max_prompt_tokens=6, max_response_tokens=14, tokens_per_step=3
)
SETTINGS = {
    "sampling": {},
    "greedy": {"temperature": 0.0},
    "filters": {"temperature": 0.8, "top_k": 5, "repetition_penalty": 1.2},
}
PENALTY = {"repetition_penalty": 1.4}


def requests(params):
    generator = torch.Generator().manual_seed(3)
    return [
        GenerationRequest(
            request_id=str(i),
            # The last prompt is longer than its slot, and goes on in the rows' own.
            prompt_ids=torch.randint(3, 50, (2 + 2 * i,), generator=generator).tolist(),
            params=SamplingParams(max_tokens=4 + 3 * i % 7, seed=i, **params),
            num_samples=1 + i % 3,
        )
        for i in range(4)
    ]


def outputs(model, params, plain, is_late=None):
    engine = NativeEngine(model, LIMITS, eos_token_ids=[1])
    if is_late is not None:
        engine.core.batch.steps.is_late = is_late
    if plain:
        engine.core.batch = RunningBatch(engine.core.runner, LIMITS)
        engine.core.cache = engine.core.batch.cache
    result = engine.generate_batch(requests(params))
    assert_nothing_is_left(engine)
    return type(engine.core.batch).__name__, [output for group in result for output in group]


@on_each_device
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("architecture", ["qwen2", "gemma2", "gpt2"])
def test_responses_are_those_of_plain_torch(device, architecture, name):
    model = tiny_model(architecture).to(device)
    plain_class, expected = outputs(model, SETTINGS[name], plain=True)
    kernel_class, found = outputs(model, SETTINGS[name], plain=False)
    assert (plain_class, kernel_class) == ("RunningBatch", "KernelBatch")
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.stop_reason == theirs.stop_reason
        assert ours.log_probs == pytest.approx(theirs.log_probs, abs=2e-5)


@on_each_device
def test_after_a_step_that_failed_while_rows_moved_all_rows_have_slots_of_their_own(device):
    model = tiny_model("qwen2").to(device)
    engine = NativeEngine(model, LIMITS, eos_token_ids=[1])
    expected = [
        output.token_ids for group in engine.generate_batch(requests({})) for output in group
    ]
    pool = engine.core.batch.budget.pool
    pool.take("a row that was moved half-way", 2)
    engine.core.batch.steps.table.slot[:2] = 3  # two rows with one slot
    engine.core._drop_all(RuntimeError("no memory for a copy"))
    found = [output.token_ids for group in engine.generate_batch(requests({})) for output in group]
    assert found == expected
    assert pool.num_free == pool.capacity


@on_each_device
@pytest.mark.parametrize("params", [{}, PENALTY])
def test_reading_results_one_visit_late_changes_no_token(device, params):
    model = tiny_model("qwen2").to(device)
    _, at_once = outputs(model, params, plain=False, is_late=False)
    _, late = outputs(model, params, plain=False, is_late=True)
    for ours, theirs in zip(late, at_once, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.log_probs == pytest.approx(theirs.log_probs, abs=2e-6)  # other neighbours
        assert (ours.stop_reason, ours.policy_versions) == (
            theirs.stop_reason,
            theirs.policy_versions,
        )


@on_each_device
@pytest.mark.parametrize("name", SETTINGS)
def test_a_response_that_was_cut_goes_on_as_if_it_had_not_been(device, name):
    engine = NativeEngine(tiny_model("qwen2").to(device), LIMITS, eos_token_ids=[1])
    engine.core.batch.steps.is_late = True
    for prompt in ([5, 6], [7, 8, 9, 10, 11, 12, 13, 14]):  # the second is longer than its slot
        params = SamplingParams(max_tokens=12, seed=4, ignore_eos=True, **SETTINGS[name])
        whole = GenerationRequest(request_id="a", prompt_ids=prompt, params=params)
        ((uncut,),) = engine.generate_batch([whole])
        (cut,) = engine.core.add(whole).groups
        for _ in range(3):
            engine.core.step()
        engine.core.abort("a")
        (sample,) = cut.samples
        num = sample.num_tokens
        assert 0 < num < 12
        rest = GenerationRequest(
            request_id="b",
            prompt_ids=sample.token_ids,
            params=dataclasses.replace(params, max_tokens=12 - num),
            num_sampled=num,
        )
        ((continued,),) = engine.generate_batch([rest])
        assert sample.output.token_ids + continued.token_ids == uncut.token_ids
    assert_nothing_is_left(engine)


@on_each_device
def test_tokens_in_flight_when_the_weights_change_belong_to_the_old_version(device):
    model, version = tiny_model("llama").to(device), [3]
    engine = NativeEngine(model, LIMITS, eos_token_ids=[1], version=lambda: version[0])
    engine.core.batch.steps.is_late = True
    request = GenerationRequest(
        request_id="a", prompt_ids=[5, 6], params=SamplingParams(max_tokens=12, ignore_eos=True)
    )
    (group,) = engine.core.add(request).groups
    engine.core.step()  # the prompt, its first token, and three more under way
    engine.core.step()
    with torch.no_grad():
        model.model.norm.weight.mul_(1.5)
    version[0] = 4
    while not group.is_finished:
        engine.core.step()
    versions = group.samples[0].output.policy_versions
    assert versions == [3] * 7 + [4] * 5
    assert_nothing_is_left(engine)


@pytest.mark.gpu
def test_a_step_with_filters_is_a_graph_of_its_own_and_capturing_leaves_no_trace():
    from verl.workers.rollout.native.kernel_steps import DecodeKind, Draw

    model = tiny_model("llama").cuda()
    params = {"top_p": 0.8, "repetition_penalty": 1.4}
    _, expected = outputs(model, params, plain=True)
    engine = NativeEngine(model, LIMITS, eos_token_ids=[1])
    found = [engine.generate_batch(requests(params)) for _ in range(2)]
    keys = engine.core.batch.steps.graphs._graphs
    draws = {key.draw for key in keys if isinstance(key, DecodeKind)}
    assert draws == {Draw(filters=True, penalty=True, renormalizes=True)}
    for result in found:
        tokens = [output.token_ids for group in result for output in group]
        assert tokens == [output.token_ids for output in expected]


@pytest.mark.gpu
def test_graphs_stay_valid_when_memory_was_given_back_and_weights_have_changed():
    model = tiny_model("llama").cuda()
    engine = NativeEngine(model, LIMITS, eos_token_ids=[])
    params = SamplingParams(max_tokens=9, temperature=0.0)
    request = GenerationRequest(request_id="a", prompt_ids=[5, 6, 7], params=params)
    before = engine.generate_batch([request])[0][0].token_ids
    held = engine.core.cache.num_bytes
    assert held > 0
    engine.sleep()
    assert engine.core.cache.num_bytes == 0
    assert engine.generate_batch([request])[0][0].token_ids == before
    assert engine.core.cache.num_bytes == held
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3, generator=torch.Generator("cuda").manual_seed(1))
    fresh = NativeEngine(model, LIMITS, eos_token_ids=[])
    expected = fresh.generate_batch([request])[0][0].token_ids
    assert expected != before
    assert engine.generate_batch([request])[0][0].token_ids == expected


@on_each_device
def test_keys_and_values_in_fp8_change_little(device):
    """Triton's interpreter rounds to e4m3 more coarsely than a GPU."""
    model = tiny_model("qwen2", scale=0.1).to(device)
    engine = NativeEngine(model, LIMITS, eos_token_ids=[1], kv_cache_dtype="fp8")
    assert engine.core.cache.shape.dtype == torch.float8_e4m3fn
    differences = []
    for request, outputs in zip(requests({}), engine.generate_batch(requests({})), strict=True):
        for output in outputs:
            trained = training_log_probs(model, list(request.prompt_ids), output.token_ids)
            differences.append((torch.tensor(output.log_probs) - trained.cpu()).abs())
    assert 1e-4 < torch.cat(differences).mean() < 0.05

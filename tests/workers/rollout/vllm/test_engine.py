"""One real vLLM in a process of its own, with a model whose embedding is also its output layer."""

import copy
import os
import signal
from collections.abc import Iterator

import pytest
import torch
from transformers import PreTrainedModel

from tests.workers.rollout.vllm.helpers import (
    GREEDY,
    PROMPT,
    assert_greedy_as,
    generate,
    needs_vllm,
    reference_log_probs,
    saved_model,
    train_a_little,
    vllm_process,
    weights_of,
)
from verl.workers.rollout.base import (
    EngineLostError,
    GenerationRequest,
    SamplingParams,
    TokenOutput,
)
from verl.workers.rollout.process.client import EngineProcess
from verl.workers.weight_sync import WeightsNotReadyError

pytestmark = needs_vllm


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    return saved_model(tmp_path_factory.mktemp("tied"), "qwen2", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def engine(
    model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineProcess]:
    folder = tmp_path_factory.mktemp("served")
    saved_model(folder, "qwen2", tie_word_embeddings=True)
    process = vllm_process(folder)
    facts = process.start()
    assert (facts.name, facts.log_probs, facts.can_sleep) == ("vllm", "processed", False)
    assert facts.max_model_len == 128
    with pytest.raises(WeightsNotReadyError):
        generate(process, GREEDY)
    process.update_weights(weights_of(model), version=1)
    yield process
    process.close()


def test_greedy_tokens_and_log_probs_are_those_of_the_weights_that_were_sent(engine, model):
    assert_greedy_as(model, engine)


def test_after_every_update_tokens_are_those_of_the_new_weights(engine, model):
    for _ in range(2):
        # The prompt was run before, so a prefix cache that survives the update would show.
        prompt_is_cached = generate(engine, GREEDY, prompt=PROMPT * 10)[0]
        train_a_little(model)
        version = engine.policy_version + 1
        published = engine.update_weights(weights_of(model), version)
        assert published.version == engine.policy_version == version
        assert_greedy_as(model, engine)
        (output,) = generate(engine, GREEDY, prompt=PROMPT * 10)
        assert output.token_ids != prompt_is_cached.token_ids
        reference = reference_log_probs(model, output, prompt=PROMPT * 10)
        assert output.token_ids == reference.argmax(-1).tolist()


def test_log_probs_are_those_at_the_temperature(engine, model):
    params = SamplingParams(temperature=0.7, max_tokens=12, seed=3, ignore_eos=True)
    (output,) = generate(engine, params)
    reference = reference_log_probs(model, output, temperature=0.7)
    drawn = reference[torch.arange(12), output.token_ids]
    torch.testing.assert_close(torch.tensor(output.log_probs), drawn, rtol=0, atol=1e-4)
    assert output.policy_versions == [engine.policy_version] * 12


def test_a_seed_gives_the_same_tokens_alone_and_among_others(engine):
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    three = generate(engine, params, num_samples=3, seeds=(11, 12, 13))
    (alone,) = generate(engine, params, num_samples=1, seeds=(13,))
    again = generate(engine, SamplingParams(max_tokens=16, seed=5), num_samples=2)
    once_more = generate(engine, SamplingParams(max_tokens=16, seed=5), num_samples=2)
    assert alone.token_ids == three[2].token_ids
    assert len({tuple(output.token_ids) for output in three}) == 3
    assert [o.token_ids for o in again] == [o.token_ids for o in once_more]
    assert again[0].token_ids != again[1].token_ids


def test_samples_without_seeds_differ(engine):
    outputs = generate(engine, SamplingParams(max_tokens=16), num_samples=8)
    assert len({tuple(output.token_ids) for output in outputs}) > 4


def test_a_response_says_why_it_ended_and_keeps_its_last_token(engine):
    (whole,) = generate(engine, GREEDY)
    third = whole.token_ids[2]
    first_place = whole.token_ids.index(third)
    stop_at_token = SamplingParams(
        temperature=0.0, max_tokens=12, ignore_eos=True, stop_token_ids=(third,)
    )
    text = chr(33 + third - 3)  # one character a token, after three special ones
    stop_at_text = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop=(text,))
    (by_token,), (by_text,) = generate(engine, stop_at_token), generate(engine, stop_at_text)
    assert whole.stop_reason == "length"
    for output in (by_token, by_text):
        assert output.stop_reason == "stop"
        assert output.token_ids == whole.token_ids[: first_place + 1]
        assert len(output.log_probs) == len(output.token_ids)


async def test_an_aborted_request_ends_with_what_it_has_and_others_go_on(engine):
    long = SamplingParams(max_tokens=58, ignore_eos=True, seed=1)
    request = GenerationRequest(request_id="long", prompt_ids=PROMPT, params=long, num_samples=2)
    reasons: list[str] = []
    num_tokens = 0
    async for delta in engine.stream(request):
        num_tokens += len(delta.token_ids)
        if num_tokens == 2:
            engine.abort("long")
        reasons += [delta.stop_reason] if delta.stop_reason else []
    assert reasons == ["abort", "abort"]
    assert 2 <= num_tokens < 2 * 58
    assert len(generate(engine, GREEDY)[0].token_ids) == 12


async def test_weights_in_flight_draw_the_later_tokens_of_a_request_that_runs(engine, model):
    if not engine.facts.can_pause:
        pytest.skip(f"vLLM {engine.facts.version} cannot hold running requests")
    params = SamplingParams(max_tokens=58, ignore_eos=True, seed=1)
    request = GenerationRequest(request_id="long", prompt_ids=PROMPT, params=params)
    output, models = TokenOutput(), {engine.policy_version: copy.deepcopy(model)}
    async for delta in engine.stream(request):
        output.token_ids += delta.token_ids
        output.log_probs += delta.log_probs
        output.policy_versions += delta.policy_versions
        if output.policy_versions[-1] == max(models) and len(models) < 3:
            train_a_little(model)
            version = engine.policy_version + 1
            engine.update_weights(weights_of(model), version, in_flight=True)
            models[version] = copy.deepcopy(model)
    assert len(output.token_ids) == 58
    assert len(set(output.policy_versions)) == 3
    for version, twin in models.items():
        said = torch.tensor(output.policy_versions) == version
        reference = reference_log_probs(twin, output)[torch.arange(58), output.token_ids]
        drawn = torch.tensor(output.log_probs)
        torch.testing.assert_close(drawn[said], reference[said], rtol=0, atol=1e-4)


def test_a_continued_request_draws_with_other_numbers(engine):
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    (first,) = generate(engine, params, seeds=(11,))
    prompt = [*PROMPT, *first.token_ids]
    (fresh,) = generate(engine, params, prompt=prompt, seeds=(11,))
    continued = [
        generate(engine, params, prompt=prompt, seeds=(11,), num_sampled=16)[0] for _ in range(2)
    ]
    assert continued[0].token_ids == continued[1].token_ids != fresh.token_ids


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], GREEDY, "empty prompt"),
        ([5] * 128, GREEDY, "prompt of 128 tokens"),
        ([96], GREEDY, "outside the vocabulary of 96"),
        (PROMPT, SamplingParams(temperature=0.001), "vLLM would silently use 0.01"),
        (PROMPT, SamplingParams(temperature=3.0), r"request r: temperature must be in \[0, 2\]"),
    ],
)
def test_what_cannot_run_is_refused_with_its_reason(engine, prompt, params, message):
    with pytest.raises(ValueError, match=message):
        generate(engine, params, prompt=prompt)


@pytest.mark.parametrize("absent", ["layers.1.self_attn.k_proj.weight", "model.norm.weight"])
def test_an_update_without_a_weight_is_refused_and_nothing_is_served(engine, model, absent):
    weights = [(name, weight) for name, weight in weights_of(model) if not name.endswith(absent)]
    version = engine.policy_version
    named = "qkv_proj" if "k_proj" in absent else absent
    with pytest.raises(ValueError, match=named):
        engine.update_weights(weights, version + 1)
    with pytest.raises(WeightsNotReadyError):
        generate(engine, GREEDY)
    engine.update_weights(weights_of(model), version + 2)
    assert_greedy_as(model, engine)


def test_an_update_that_breaks_off_is_withheld_and_the_next_one_serves(engine, model):
    def breaking() -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in weights_of(model):
            if name == "model.layers.1.self_attn.v_proj.weight":  # queries and keys are there
                raise RuntimeError("the sender fell over")
            yield name, weight

    version = engine.policy_version
    with pytest.raises(RuntimeError, match="fell over"):
        engine.update_weights(breaking(), version + 1)
    with pytest.raises(WeightsNotReadyError):
        engine.policy_version  # noqa: B018
    engine.update_weights(weights_of(model), version + 2)
    assert_greedy_as(model, engine)


def test_a_killed_engine_is_lost_and_its_successor_serves_nothing_stale(engine, model):
    lost = engine.pid
    os.kill(lost, signal.SIGKILL)
    with pytest.raises(EngineLostError):
        generate(engine, GREEDY)
    engine.restart()
    assert engine.pid != lost
    with pytest.raises(WeightsNotReadyError):
        generate(engine, GREEDY)
    train_a_little(model)
    engine.update_weights(weights_of(model), version=40)
    assert engine.policy_version == 40
    assert_greedy_as(model, engine)

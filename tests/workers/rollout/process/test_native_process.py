"""The built-in engine in a process of its own gives what it gives here: tokens and log-probs."""

import asyncio
import copy
import re
from pathlib import Path

import pytest
import torch

from tests.tiny_models import tiny_model
from tests.tiny_tokenizer import tiny_tokenizer
from tests.workers.rollout.helpers import LIMITS, build_engine, request
from tests.workers.rollout.test_continued import SETTINGS, joined, rest_of
from verl.workers.rollout.base import SamplingParams, TokenOutput
from verl.workers.rollout.process.client import EngineProcess, EngineSpec
from verl.workers.rollout.process.native import BUILD, native_options
from verl.workers.weight_sync import WeightsNotReadyError

TIED = "qwen2"


@pytest.fixture(scope="module")
def model():
    return tiny_model(TIED, scale=0.1)


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def engine(folder):
    engine = EngineProcess(
        EngineSpec(
            build=BUILD,
            options=native_options(str(folder), LIMITS, exact=True),
            environment={"OMP_NUM_THREADS": "1"},
            has_weights=True,
            bucket_bytes=4096,
        )
    )
    engine.start()
    yield engine
    engine.close()


def in_process(model, version):
    return build_engine(
        model, version=lambda: version, decode_text=lambda ids: str(tiny_tokenizer().decode(ids))
    )


def some_requests(count, max_tokens=12):
    return [
        request(
            [3 + number % 90, 7],
            SamplingParams(
                seed=number,
                max_tokens=1 + number % max_tokens,
                temperature=0.7 if number % 2 else 1.3,
                top_p=0.9 if number % 3 else 1.0,
            ),
            str(number),
            num_samples=1 + number % 3,
        )
        for number in range(count)
    ]


def token_ids(answers):
    return [[output.token_ids for output in samples] for samples in answers]


def assert_same(answers, expected):
    """Who runs beside whom may differ, and with it the last bits of log-probabilities."""
    assert token_ids(answers) == token_ids(expected)
    for samples, wanted in zip(answers, expected, strict=True):
        for output, other in zip(samples, wanted, strict=True):
            assert output.policy_versions == other.policy_versions
            assert output.stop_reason == other.stop_reason
            torch.testing.assert_close(output.log_probs, other.log_probs, rtol=0, atol=1e-5)


def test_what_was_loaded_from_disk_gives_the_same_tokens_and_log_probs(engine, model):
    requests = some_requests(40)
    assert engine.policy_version == 0
    assert_same(engine.generate_batch(requests), in_process(model, 0).generate_batch(requests))


def test_the_engine_tells_how_long_a_first_token_took_and_how_full_its_cache_was(engine):
    usages = []
    params = SamplingParams(max_tokens=16, seed=5, ignore_eos=True)
    future = engine.submit(request([5], params), lambda *ended: usages.append(engine.cache_usage))
    (output,) = future.result(timeout=60)
    assert output.first_token_seconds > 0
    assert usages == [0], "its place is free before the end is told"


async def test_two_hundred_callers_get_what_the_batch_call_gives(engine, model):
    requests = some_requests(200, max_tokens=4)
    expected = in_process(model, engine.policy_version).generate_batch(requests)
    assert_same(await asyncio.gather(*map(engine.generate, requests)), expected)


async def test_deltas_add_up_also_where_a_stop_text_cuts_tokens_off(engine, model):
    local = in_process(model, 0)
    free = SamplingParams(max_tokens=16, seed=5, ignore_eos=True)
    ((output,),) = local.generate_batch([request([5], free)])
    text = tiny_tokenizer().decode(output.token_ids[8:10]).replace(" ", "")
    stopped = SamplingParams(max_tokens=16, seed=5, ignore_eos=True, stop=(text[0],))
    ((expected,),) = local.generate_batch([request([5], stopped)])
    tokens, log_probs, reason = [], [], ""
    async for delta in engine.stream(request([5], stopped)):
        tokens += delta.token_ids
        log_probs += delta.log_probs
        reason = delta.stop_reason
    assert (tokens, reason) == (expected.token_ids, "stop")
    torch.testing.assert_close(log_probs, expected.log_probs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("settings", SETTINGS)
async def test_a_continued_request_gives_the_bits_of_the_uncut_one(engine, settings):
    params = SamplingParams(max_tokens=16, seed=7, **SETTINGS[settings])
    whole = request([5, 6, 7], params, settings)
    (uncut,) = await engine.generate(whole)
    parts, left = [], whole
    while not parts or parts[-1].stop_reason == "abort":
        parts.append(TokenOutput())
        async for delta in engine.stream(left):
            parts[-1].token_ids += delta.token_ids
            parts[-1].log_probs += delta.log_probs
            parts[-1].policy_versions += delta.policy_versions
            parts[-1].stop_reason = delta.stop_reason
            if parts[-1].token_ids and not delta.stop_reason:
                engine.abort(settings)
        if parts[-1].stop_reason == "abort":
            left = rest_of(left, parts[-1])
    assert joined(parts) == joined([uncut])


async def test_an_aborted_request_frees_its_place(engine):
    endless = SamplingParams(max_tokens=16, ignore_eos=True)
    tasks = [
        asyncio.create_task(engine.generate(request([5], endless, "a", num_samples=8)))
        for _ in range(30)
    ]
    await asyncio.sleep(0)  # all are asked for, and few have begun
    engine.abort("a")
    outputs = [output for task in tasks for output in await task]
    assert {output.stop_reason for output in outputs} >= {"abort"}
    engine.sleep()  # refused if any were left
    engine.wake_up()


@pytest.mark.parametrize(
    ("prompt", "complaint"),
    [([], "empty prompt"), ([96], "outside the vocabulary"), ([5] * 28, "a prompt of 28 tokens")],
)
def test_what_cannot_run_is_refused_with_the_engines_reason(engine, prompt, complaint):
    with pytest.raises(ValueError, match=complaint):
        engine.generate_batch([request(prompt, SamplingParams(max_tokens=3))])


def test_turns_of_a_conversation_use_what_is_kept_of_it(engine, model):
    local, params = in_process(model, 0), SamplingParams(max_tokens=3, seed=1, ignore_eos=True)
    for side in (engine, local):
        ((first,),) = side.generate_batch([request([5, 6], params, session_ids=("s",))])
        prompt = [5, 6, *first.token_ids, 9]
        ((second,),) = side.generate_batch([request(prompt, params, session_ids=("s",))])
        side.close_session("s")
        if side is engine:
            expected = second
    assert second.token_ids == expected.token_ids
    torch.testing.assert_close(second.log_probs, expected.log_probs, rtol=0, atol=1e-6)


def test_new_weights_give_what_they_give_here_and_old_prefixes_are_forgotten(engine, model):
    trained = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    requests = some_requests(20)
    before = engine.generate_batch(requests)
    published = engine.update_weights(trained.named_parameters(), version=7)
    assert published.version == 7
    after = engine.generate_batch(requests)
    assert_same(after, in_process(trained, 7).generate_batch(requests))
    assert token_ids(after) != token_ids(before)
    engine.update_weights(model.named_parameters(), version=8)


def test_an_update_without_some_weights_leaves_an_engine_that_serves_nothing(engine, model):
    weights = dict(model.named_parameters())
    weights.pop("model.norm.weight")
    with pytest.raises(ValueError, match=r"1 weights were not in the update, such as 'model\.norm"):
        engine.update_weights(weights.items(), version=9)
    with pytest.raises(WeightsNotReadyError):
        engine.generate_batch(some_requests(1))
    with pytest.raises(ValueError, match="has no weight 'surprise'"):
        engine.update_weights([("surprise", torch.zeros(1))], version=9)
    with pytest.raises(WeightsNotReadyError):
        engine.generate_batch(some_requests(1))
    engine.update_weights(model.named_parameters(), version=9)
    assert engine.policy_version == 9


@pytest.mark.slow
def test_the_example_of_the_page_runs(folder, model):
    page = (Path(__file__).parents[4] / "docs" / "engine_processes.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names = {"model": model}
    exec(compile(example.replace("path/to/model", str(folder)), "docs", "exec"), names)
    assert len(names["output"].token_ids) == 20
    assert not names["engine"].is_alive()


@pytest.mark.gpu
def test_weights_on_a_gpu_reach_an_engine_on_the_same_gpu(folder, model):
    options = native_options(str(folder), LIMITS, device="cuda", dtype="bfloat16")
    engine = EngineProcess(EngineSpec(build=BUILD, options=options, bucket_bytes=4096))
    engine.start()
    try:
        weights = [(name, w.detach().cuda().bfloat16()) for name, w in model.named_parameters()]
        assert engine.update_weights(weights, version=1).version == 1
        greedy = SamplingParams(max_tokens=5, temperature=0.0)
        ((output,),) = engine.generate_batch([request([5, 6], greedy)])
        assert output.policy_versions == [1] * len(output.token_ids)
    finally:
        engine.close()

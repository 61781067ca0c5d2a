"""The engine with pages gives what it gives with slots, token for token."""

import dataclasses
import logging

import pytest
import torch

from tests.models.kernels.devices import INTERPRETED, on_each_device
from tests.tiny_models import tiny_model
from tests.workers.rollout.helpers import assert_nothing_is_left
from verl.workers.rollout.base import GenerationRequest, SamplingParams
from verl.workers.rollout.native.engine import EngineLimits, NativeEngine
from verl.workers.rollout.native.pages import PAGE

LIMITS = EngineLimits(
    max_num_seqs=6,
    max_prompt_tokens=70,
    max_response_tokens=80,
    max_session_bytes=0,
    tokens_per_step=3,
)
SETTINGS = {"sampling": {}, "greedy": {"temperature": 0.0}, "penalty": {"repetition_penalty": 1.4}}


def small_model(device):
    """Two layers with one KV head: the interpreter takes its time."""
    return tiny_model("qwen2", num_attention_heads=2, num_key_value_heads=1).to(device)


def requests(params):
    """Prompts around the length of a page; the last is longer than a prompt slot."""
    generator = torch.Generator().manual_seed(3)
    return [
        GenerationRequest(
            request_id=str(i),
            prompt_ids=torch.randint(3, 50, (length,), generator=generator).tolist(),
            params=SamplingParams(max_tokens=6 + i, seed=i, ignore_eos=True, **params),
            num_samples=num_samples,
        )
        for i, (length, num_samples) in enumerate([(60, 1), (64, 2), (72, 1)])
    ]


def build(model, num_pages=None, limits=LIMITS):
    """An engine with slots, or with so many pages, page 0 included."""
    if num_pages is not None:
        config = model.config
        head_dim = config.hidden_size // config.num_attention_heads
        numbers = config.num_hidden_layers * config.num_key_value_heads * 2 * head_dim
        token_bytes = numbers * model.dtype.itemsize
        limits = dataclasses.replace(limits, max_cache_bytes=num_pages * PAGE * token_bytes)
    engine = NativeEngine(model, limits, eos_token_ids=[1])
    assert type(engine.core.batch).__name__ == (
        "KernelBatch" if num_pages is None else "PagedBatch"
    )
    if num_pages is not None:
        assert engine.core.batch.budget.pool.num_pages == num_pages
    return engine


def run(engine, asked):
    outputs = [output for group in engine.generate_batch(asked) for output in group]
    assert_nothing_is_left(engine)
    return outputs


def assert_all_pages_are_free(engine):
    pool = engine.core.batch.budget.pool
    assert pool.num_free == pool.capacity


def assert_same(found, expected):
    """Up to the last digits, which libraries round differently for passes of other sizes."""
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.stop_reason == theirs.stop_reason
        assert ours.log_probs == pytest.approx(theirs.log_probs, abs=2e-5)


@on_each_device
@pytest.mark.parametrize("name", SETTINGS)
def test_responses_are_those_of_slots_also_of_who_gives_way(device, name):
    model = small_model(device)
    asked = requests(SETTINGS[name])
    expected = run(build(model), asked)
    engine = build(model, num_pages=14)
    assert_same(run(engine, asked), expected)
    assert engine.core.num_preempted == 0
    assert_all_pages_are_free(engine)
    engine = build(model, num_pages=7)
    engine.core.batch.steps.is_late = True
    engine.core.batch.budget._lookahead = 0  # so that those who run soon want more than there is
    found = run(engine, asked)
    assert_same(found, expected)
    assert engine.core.num_preempted == sum(output.num_preempted for output in found) > 0
    assert_all_pages_are_free(engine)


@on_each_device
def test_the_oldest_goes_on_the_others_give_way_and_it_is_said_once(device, caplog):
    engine = build(small_model(device), num_pages=4)
    engine.core.batch.budget._lookahead = 0
    # Prompts of 60 tokens take a page each, of which there are three; with 65 tokens they want two.
    asked = [dataclasses.replace(requests({})[0], request_id=str(i)) for i in range(3)]
    with caplog.at_level(logging.WARNING):
        outputs = run(engine, asked)
    assert [output.num_preempted for output in outputs] == [0, 1, 1]
    assert outputs[1].token_ids == outputs[0].token_ids
    assert engine.core.num_preempted == 2
    (said,) = [r.message for r in caplog.records if "keys and values is full" in r.message]
    assert "request 2 waits" in said, "the youngest gives way first"


@on_each_device
def test_a_conversation_goes_on_from_the_pages_of_its_last_turn(device):
    model = small_model(device)
    outputs = {}
    for num_pages in (None, 14):
        engine = build(model, num_pages)
        history, turns = requests({})[1].prompt_ids[:60], []
        for number in range(3):
            params = SamplingParams(max_tokens=6, seed=number, ignore_eos=True)
            request = GenerationRequest(
                request_id="a", prompt_ids=history, params=params, session_ids=("s",)
            )
            (output,) = run(engine, [request])
            turns.append(output)
            history = [*history, *output.token_ids, 40, 41]
        assert engine.core.num_prefilled_tokens == 60 + 2 * (1 + 2)
        outputs[num_pages] = turns
    assert_same(outputs[14], outputs[None])


@on_each_device
def test_new_weights_in_the_middle_leave_no_page_behind(device):
    model, version = small_model(device), [3]
    engine = build(model, num_pages=14)
    engine.core._version = lambda: version[0]
    engine.core.batch.steps.is_late = True
    groups = [group for request in requests({}) for group in engine.core.add(request).groups]
    for _ in range(2):
        engine.core.step()
    version[0] = 4
    engine.core.abort("1")
    while not all(group.is_finished for group in groups):
        engine.core.step()
    engine.core.batch.flush()
    assert_nothing_is_left(engine)
    assert_all_pages_are_free(engine)
    assert {v for group in groups for s in group.samples for v in s.output.policy_versions} == {
        3, 4,
    }  # fmt: skip


@on_each_device
def test_a_step_that_fails_leaves_all_pages_free(device):
    model = small_model(device)
    engine = build(model, num_pages=14)
    expected = run(engine, requests({}))
    (group,) = engine.core.add(requests({})[0]).groups
    engine.core.step()
    with torch.no_grad():
        kept = model.model.norm.weight.clone()
        model.model.norm.weight.fill_(torch.nan)
    with pytest.raises(FloatingPointError):
        engine.generate_batch(requests({})[1:2])
    assert group.is_finished
    assert_all_pages_are_free(engine)
    with torch.no_grad():
        model.model.norm.weight.copy_(kept)
    assert_same(run(engine, requests({})), expected)


@on_each_device
def test_a_sequence_that_does_not_fit_alone_is_refused_at_the_start(device):
    model = small_model(device)
    with pytest.raises(ValueError, match=r"3 pages .* takes 3.*rollout.response_length"):
        build(model, num_pages=3)
    build(model, num_pages=4)


@on_each_device
def test_a_request_for_more_samples_than_fit_becomes_several_groups(device):
    engine = build(small_model(device), num_pages=5)
    params = SamplingParams(max_tokens=70, seed=1)
    running = engine.core.add(
        GenerationRequest(request_id="a", prompt_ids=[5] * 10, params=params, num_samples=5)
    )
    assert [len(group.samples) for group in running.groups] == [2, 2, 1]  # of two pages each


@pytest.mark.gpu
def test_graphs_stay_valid_when_the_memory_of_pages_was_given_back():
    model = small_model("cuda")
    engine = build(model, num_pages=14)
    asked = requests({})
    before = run(engine, asked)
    held = engine.core.cache.num_bytes
    assert held > 0
    engine.sleep()
    assert engine.core.cache.num_bytes == 0
    assert_same(run(engine, asked), before)
    assert engine.core.cache.num_bytes == held


@pytest.mark.gpu
def test_a_third_of_the_memory_gives_the_tokens_of_all_of_it():
    """64 prompts x 4 of mixed lengths; a third of 256 slots of 768 tokens is 1,024 pages."""
    model = tiny_model("qwen2", max_position_embeddings=1024).cuda()
    limits = EngineLimits(
        max_num_seqs=256,
        max_prompt_tokens=256,
        max_response_tokens=512,
        max_session_bytes=0,
        tokens_per_step=8,
    )
    generator = torch.Generator().manual_seed(4)
    asked = [
        GenerationRequest(
            request_id=str(i),
            prompt_ids=torch.randint(3, 90, (int(length),), generator=generator).tolist(),
            # Most go on to the end, where they want twice as many pages as there are.
            params=SamplingParams(
                max_tokens=(512, 512, 512, 40 + i)[i % 4], seed=i, ignore_eos=True
            ),
            num_samples=4,
        )
        for i, length in enumerate(torch.randint(1, 257, (64,), generator=generator))
    ]
    expected = run(build(model, limits=limits), asked)
    num_pages = 256 * (256 + 512) // PAGE // 3
    engine = build(model, num_pages, limits)
    found = run(engine, asked)
    differing = sum(a.token_ids != b.token_ids for a, b in zip(found, expected, strict=True))
    assert differing <= 2  # where a draw falls between two roundings
    assert engine.core.num_preempted == sum(output.num_preempted for output in found) > 0
    assert_all_pages_are_free(engine)


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=INTERPRETED)])
def test_prefills_of_fixed_sizes_fill_pages_as_well(device):
    from verl.workers.rollout.native.graphs import PrefillBuckets

    model, asked = small_model(device), requests({})
    expected = run(build(model), asked)
    engine = build(model, num_pages=7)
    engine.core.batch.budget._lookahead = 0
    engine.core.batch.steps.buckets = PrefillBuckets(
        engine.core.runner,
        engine.core.cache,
        256,
        engine.core.batch.num_rows,
        lambda kind, run: run(),
    )
    assert_same(run(engine, asked), expected)
    assert engine.core.num_preempted > 0
    assert engine.core.batch.steps.buckets._buckets, "they were used"

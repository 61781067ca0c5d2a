"""Prefills of fixed sizes give what a prefill of just the right size gives."""

import dataclasses

import pytest
import torch
from transformers import Qwen2Config

from tests.models.kernels.devices import INTERPRETED, on_each_device
from tests.tiny_models import tiny_model
from tests.workers.rollout.helpers import assert_nothing_is_left
from verl.models.loading import random_causal_lm
from verl.workers.rollout.base import GenerationRequest, SamplingParams
from verl.workers.rollout.native.attention import PrefillSequence
from verl.workers.rollout.native.cache import CacheShape, KVCache
from verl.workers.rollout.native.engine import EngineLimits, NativeEngine
from verl.workers.rollout.native.model_runner import ModelRunner
from verl.workers.rollout.native.sessions import KnownTokens

NUM_SLOTS, MAX_TOKENS = 9, 128


def sequence(num_tokens, num_shared, prompt_slot, slots, **options):
    generator = torch.Generator().manual_seed(num_tokens)
    ids = torch.randint(3, 90, (num_tokens,), generator=generator).tolist()
    return PrefillSequence(
        token_ids=ids, num_shared=num_shared, prompt_slot=prompt_slot, slots=slots, **options
    )


BATCHES = {
    "one token": [sequence(1, 1, 4, [2])],
    "exactly a size": [sequence(60, 60, 1, [5]), sequence(4, 4, 0, [0, 7])],
    "exactly the largest": [sequence(68, 68, 3, [6]), sequence(60, 60, 8, [1, 2])],
    "longer than a prompt slot": [sequence(5, 5, 2, [3]), sequence(77, 70, 5, [8, 1, 4])],
    "samples that ran before": [
        sequence(12, 9, 6, [0]),
        sequence(15, 9, 6, [2], fills_prompt=False),
        sequence(3, 3, 1, [7]),
    ],
    "a prompt that is there already": [sequence(15, 9, 6, [3], fills_prompt=False)],
    "a turn that goes on in its slots, beside one that begins": [
        sequence(40, 30, 2, [4], known=KnownTokens([0] * 33)),
        sequence(45, 40, 5, [0], known=KnownTokens([0] * 35)),
        sequence(20, 14, 1, [3, 6]),
    ],
}


def at_once(kind, run):
    run()


def make_buckets(runner, cache, replay=at_once, max_tokens=MAX_TOKENS):
    from verl.workers.rollout.native.graphs import PrefillBuckets

    return PrefillBuckets(runner, cache, max_tokens, cache.max_slots, replay)


def empty_cache(runner, max_prompt_tokens=70):
    cache = KVCache(
        CacheShape(
            layers=runner.head_shapes(),
            max_prompt_tokens=max_prompt_tokens,
            max_response_tokens=20,
            dtype=runner.cache_dtype,
            device=runner.device,
        ),
        NUM_SLOTS,
    )
    cache.reserve(NUM_SLOTS, NUM_SLOTS)
    return cache


def contents(cache):
    return [slots for pair in (*cache.prompt, *cache.response) for slots in pair]


def hidden_and_contents(runner, sequences):
    """As the layout for just these sequences gives them."""
    from verl.workers.rollout.native.slot_layouts import SlotPrefillLayout

    cache = empty_cache(runner)
    return runner.prefill(SlotPrefillLayout(cache, sequences), sequences), contents(cache)


@on_each_device
@pytest.mark.parametrize("architecture", ["qwen2", "gemma2", "gpt_oss"])
def test_hidden_states_and_cache_are_those_of_a_prefill_of_the_right_size(device, architecture):
    if (device, architecture) == ("cuda", "gpt_oss"):
        pytest.skip("a tiny head of 8 with sinks is tested through the interpreter")
    runner = ModelRunner(tiny_model(architecture).to(device))
    buckets = None
    for sequences in BATCHES.values():
        cache = empty_cache(runner)
        buckets = buckets or make_buckets(runner, cache)
        buckets.cache = cache
        found = buckets.last_hidden(sequences)
        expected, expected_contents = hidden_and_contents(runner, sequences)
        pairs = [(found, expected), *zip(contents(cache), expected_contents, strict=True)]
        for ours, theirs in pairs:
            if device == "cpu":
                assert torch.equal(ours, theirs)
            else:  # products over other numbers of rows are rounded differently
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=INTERPRETED)])
def test_the_first_prefill_takes_the_largest_size_and_later_ones_the_next_larger(device):
    runner, kinds = ModelRunner(tiny_model("qwen2")), []

    def write_down(kind, run):
        kinds.append((kind.num_tokens, kind.has_own))
        run()

    buckets = make_buckets(runner, empty_cache(runner), write_down)
    for name in ("one token", "exactly a size", "samples that ran before", "exactly the largest"):
        buckets.last_hidden(BATCHES[name])
    assert kinds == [(128, False), (64, False), (64, True), (128, False)]
    # 29 new tokens, but 5 * 26 copies into rows' own slots.
    assert buckets.last_hidden([sequence(29, 3, 0, [0, 1, 2, 3, 4])]) is None
    assert buckets.last_hidden([sequence(129, 129, 0, [0])]) is None
    assert len(kinds) == 4


LIMITS = EngineLimits(
    max_num_seqs=6,
    max_prompt_tokens=6,
    max_response_tokens=14,
    max_prefill_tokens=64,
    tokens_per_step=3,
)


def requests():
    generator = torch.Generator().manual_seed(3)
    return [
        GenerationRequest(
            request_id=str(i),
            prompt_ids=torch.randint(3, 50, (2 + 2 * i,), generator=generator).tolist(),
            params=SamplingParams(max_tokens=1 + 2 * (i % 3), seed=i),
            num_samples=1 + i % 3,
        )
        for i in range(4)
    ]


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=INTERPRETED)])
def test_an_engine_whose_rows_come_and_go_gives_the_same_tokens(device):
    model = tiny_model("qwen2")
    results, log_probs = [], []
    for uses_buckets, is_late in ((False, False), (True, False), (True, True)):
        engine = NativeEngine(model, LIMITS, eos_token_ids=[1])
        engine.core.batch.steps.is_late = is_late
        if uses_buckets:
            engine.core.batch.steps.buckets = make_buckets(
                engine.core.runner, engine.core.cache, max_tokens=64
            )
        groups = engine.generate_batch(requests())
        assert_nothing_is_left(engine)
        assert not engine.core.batch.steps.in_flight
        outputs = [output for group in groups for output in group]
        results.append([(x.token_ids, x.stop_reason) for x in outputs])
        log_probs.append([value for x in outputs for value in x.log_probs])
    assert results[0] == results[1] == results[2]
    for found in log_probs[1:]:  # rows have other neighbours
        assert found == pytest.approx(log_probs[0], abs=2e-6)


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=INTERPRETED)])
def test_the_next_prefill_is_started_before_the_first_tokens_of_the_last_are_read(device):
    limits = dataclasses.replace(LIMITS, max_prefill_tokens=4)
    engine = NativeEngine(tiny_model("qwen2"), limits, eos_token_ids=[])
    engine.core.batch.steps.is_late = True
    params = SamplingParams(max_tokens=1)
    groups = [
        engine.core.add(
            GenerationRequest(request_id=name, prompt_ids=[5, 6, 7], params=params)
        ).groups[0]
        for name in "ab"
    ]
    engine.core.step()
    assert [group.is_finished for group in groups] == [False, False]
    assert len(engine.core.batch.steps.in_flight) == 1
    engine.core.step()  # b is under way when a is read
    assert [group.is_finished for group in groups] == [True, False]
    engine.core.step()
    assert [group.is_finished for group in groups] == [True, True]
    assert not engine.core.batch.steps.in_flight
    assert_nothing_is_left(engine)


@pytest.mark.gpu
def test_replays_of_sizes_in_turn_give_the_bits_of_work_done_at_once():
    from verl.workers.rollout.native.graphs import StepGraphs

    runner, graphs = ModelRunner(tiny_model("gemma2").cuda()), StepGraphs()
    caches = [empty_cache(runner), empty_cache(runner)]
    replayed = make_buckets(runner, caches[0], graphs.replay)
    eager = make_buckets(runner, caches[1])
    for name in [*BATCHES, *reversed(BATCHES), *BATCHES]:
        with torch.no_grad():  # as an update between two rollouts does
            runner.module.model.norm.weight.mul_(1.1)
        found, expected = (x.last_hidden(BATCHES[name]) for x in (replayed, eager))
        assert torch.equal(found, expected)
        for ours, theirs in zip(*map(contents, caches), strict=True):
            assert torch.equal(ours, theirs)
    kinds = {(kind.num_tokens, kind.has_own) for kind in graphs._graphs}
    assert kinds == {(128, False), (64, False), (96, True), (64, True)}


@pytest.mark.gpu
def test_prefill_graphs_stay_valid_when_the_cache_was_given_back_in_between():
    from verl.workers.rollout.native.graphs import PrefillKind

    model = tiny_model("llama").cuda()
    plain = NativeEngine(model, LIMITS, eos_token_ids=[1])
    plain.core.batch.steps.buckets = None
    expected = plain.generate_batch(requests())
    engine = NativeEngine(model, LIMITS, eos_token_ids=[1])
    found = [engine.generate_batch(requests())]
    num_graphs = len(engine.core.batch.steps.graphs._graphs)
    assert any(isinstance(kind, PrefillKind) for kind in engine.core.batch.steps.graphs._graphs)
    engine.sleep()
    engine.wake_up()
    found.append(engine.generate_batch(requests()))
    assert len(engine.core.batch.steps.graphs._graphs) == num_graphs
    for result in found:
        for ours, theirs in zip(result, expected, strict=True):
            assert [x.token_ids for x in ours] == [x.token_ids for x in theirs]


@pytest.mark.gpu
def test_graphs_of_all_sizes_take_little_more_memory_than_the_largest_pass():
    config = Qwen2Config(
        vocab_size=1000, hidden_size=512, intermediate_size=8192, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=2,
    )  # fmt: skip
    with torch.device("cuda"):
        runner = ModelRunner(random_causal_lm(config, dtype=torch.bfloat16))
    from verl.workers.rollout.native.graphs import StepGraphs

    graphs, largest = StepGraphs(), 8192
    cache = empty_cache(runner, max_prompt_tokens=largest)
    eager = make_buckets(runner, cache, max_tokens=largest)
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    eager.last_hidden([sequence(largest, largest, 0, [0])])
    peak = torch.cuda.max_memory_allocated() - held
    buckets = make_buckets(runner, cache, graphs.replay, max_tokens=largest)
    for size in buckets.sizes:
        buckets.last_hidden([sequence(size, size, 0, [0])])
    assert len(graphs._graphs) == len(buckets.sizes) - 1  # the first prefill took the largest
    segments = torch.cuda.memory_snapshot()
    pool = sum(s["total_size"] for s in segments if s["segment_pool_id"] == graphs._pool)
    assert peak > 256 << 20
    assert 0 < pool <= 1.5 * peak + (64 << 20)

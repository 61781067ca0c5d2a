"""Requests among others: the same tokens as alone, nothing lost, nothing left behind."""

import dataclasses
import itertools
import random

import pytest
import torch

from tests.tiny_models import tiny_model
from tests.workers.rollout.helpers import EOS, assert_nothing_is_left, build_engine, request
from verl.workers.rollout.base import SamplingParams
from verl.workers.rollout.native.engine import EngineLimits


def decode(ids):
    return "".join(f"<{token}>" for token in ids)


def pool(count=24, max_prompt=9):
    """Requests of every kind: lengths, groups, filters, stop tokens and texts."""
    rng = random.Random(5)
    kinds = [
        {},
        {"temperature": 0},
        {"temperature": 0.7, "top_p": 0.8},
        {"top_k": 7, "min_p": 0.02},
        {"repetition_penalty": 1.4},
        {"stop": ("<7><", "<40>")},
        {"stop_token_ids": (11, 12, 13, 14, 15, 16)},
        {"ignore_eos": True},
    ]
    return [
        request(
            [rng.randrange(3, 96) for _ in range(rng.randint(1, max_prompt))],
            SamplingParams(seed=number, max_tokens=rng.randint(1, 12), **kinds[number % 8]),
            str(number),
            num_samples=rng.choice((1, 1, 2, 3)),
        )
        for number in range(count)
    ]


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", scale=0.1)


@pytest.fixture(scope="module")
def alone(model):
    """What each request of the pool gives in an engine of its own."""
    return [build_engine(model, decode_text=decode).generate_batch([r])[0] for r in pool()]


def assert_same(outputs, expected):
    """Aborted ones may be shorter."""
    for output, whole in zip(outputs, expected, strict=True):
        count = len(output.token_ids)
        if output.stop_reason == "abort":
            assert count <= len(whole.token_ids)
        else:
            assert output.stop_reason == whole.stop_reason
            assert count == len(whole.token_ids)
        assert output.token_ids == whole.token_ids[:count]
        assert len(output.log_probs) == len(output.policy_versions) == count
        torch.testing.assert_close(
            torch.tensor(output.log_probs),
            torch.tensor(whole.log_probs[:count]),
            rtol=0,
            atol=2e-6,
        )


def test_all_at_once_gives_what_each_gives_alone(model, alone):
    engine = build_engine(model, decode_text=decode)
    outputs = engine.generate_batch(pool())
    assert {o.stop_reason for samples in outputs for o in samples} == {"stop", "length"}
    for samples, expected in zip(outputs, alone, strict=True):
        assert_same(samples, expected)
    assert_nothing_is_left(engine)


@pytest.mark.parametrize("number", [0, 3, 5])
def test_a_request_among_thirty_others_that_come_and_go_gives_what_it_gives_alone(
    model, alone, number
):
    engine = build_engine(model, EngineLimits(max_num_seqs=12), decode_text=decode)
    target = pool()[number]
    others = [dataclasses.replace(r, request_id=f"other {i}") for i, r in enumerate(pool(30))]
    for other in others[:10]:
        engine.core.add(other)
    engine.core.step()
    running = engine.core.add(target)
    for i, other in enumerate(others[10:]):
        engine.core.add(other)
        engine.core.step()
        engine.core.abort(f"other {2 * i}")
    while engine.core.scheduler.unfinished:
        engine.core.step()
    assert_same(running.outputs, alone[number])


@pytest.mark.parametrize(
    "seeds", [range(15), pytest.param(range(15, 100), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_random_schedules_give_what_each_request_gives_alone(model, alone, seeds):
    requests = pool()
    for seed in seeds:
        rng = random.Random(seed)
        limits = EngineLimits(
            max_num_seqs=rng.randint(3, 9),
            max_prompt_tokens=rng.randint(2, 9),  # the rest goes into response slots
            max_response_tokens=20,
            max_prefill_tokens=rng.randint(1, 30),
            tokens_per_step=rng.randint(1, 5),
        )
        engine = build_engine(model, limits, decode_text=decode)
        chosen = rng.sample(range(len(requests)), 8)
        running = {}
        for number in chosen:
            running[number] = engine.core.add(requests[number])
            for _ in range(rng.randint(0, 2)):
                engine.core.step()
            if rng.random() < 0.2:
                engine.core.abort(str(rng.choice(list(running))))
        for _ in range(200):
            if not engine.core.scheduler.unfinished:
                break
            engine.core.step()
        assert_nothing_is_left(engine)
        for number, one in running.items():
            samples = one.outputs
            assert len(samples) == requests[number].num_samples
            assert_same(samples, alone[number])


def test_equal_seeds_give_equal_tokens_and_samples_differ(model):
    engine = build_engine(model)
    params = SamplingParams(seed=9, max_tokens=12, ignore_eos=True)
    first, again, other = engine.generate_batch(
        [
            request([5, 6], params, "a", num_samples=3),
            request([5, 6], params, "b", num_samples=3),
            request([5, 6], SamplingParams(seed=10, max_tokens=12, ignore_eos=True), "c"),
        ]
    )
    assert [o.token_ids for o in first] == [o.token_ids for o in again]
    everyone = [tuple(o.token_ids) for o in (*first, *other)]
    assert len(set(everyone)) == 4


def test_a_sample_with_a_seed_of_its_own_gives_what_it_gives_alone(model):
    engine = build_engine(model)
    (together,) = engine.generate_batch(
        [request([5, 6], SamplingParams(max_tokens=8), num_samples=3, seeds=(4, 4, 8))]
    )
    for output, seed in zip(together, (4, 4, 8), strict=True):
        params = SamplingParams(max_tokens=8, seed=seed)
        ((single,),) = build_engine(model).generate_batch([request([5, 6], params)])
        assert output.token_ids == single.token_ids


def test_requests_without_a_seed_differ_from_each_other_but_not_from_run_to_run(model):
    def two():
        engine = build_engine(model, seed=5)
        params = SamplingParams(max_tokens=12, ignore_eos=True)
        return [
            samples[0].token_ids
            for samples in engine.generate_batch(
                [request([5], params, "a"), request([5], params, "b")]
            )
        ]

    first, second = two()
    assert first != second
    assert two() == [first, second]


def forced_model(*ids):
    """Says `ids` one after the other, then the last for ever: position p predicts ids[p]."""
    model = tiny_model("llama", tie_word_embeddings=False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layers" in name and "norm" not in name:
                parameter.zero_()  # what goes in comes out
        model.model.embed_tokens.weight.copy_(torch.eye(96, 32))
        head = torch.zeros(96, 32)
        for now, after in itertools.pairwise(ids):
            head[after, now] = 10.0
        model.lm_head.weight.copy_(head)
    return model


def say(model, prompt, **params):
    engine = build_engine(model, decode_text=decode)
    ((output,),) = engine.generate_batch([request(prompt, SamplingParams(temperature=0, **params))])
    return output


def test_a_response_ends_with_the_end_of_sequence_token():
    output = say(forced_model(5, 6, 7, EOS, 8, 9), [5])
    assert output.token_ids == [6, 7, EOS]
    assert output.stop_reason == "stop"


def test_ignore_eos_goes_on_to_the_limit():
    output = say(forced_model(5, 6, 7, EOS, 8, 9), [5], ignore_eos=True, max_tokens=5)
    assert output.token_ids == [6, 7, EOS, 8, 9]
    assert output.stop_reason == "length"


def test_stop_tokens_end_it_even_if_eos_is_ignored():
    model = forced_model(5, 6, 7, EOS, 8, 9)
    output = say(model, [5], ignore_eos=True, stop_token_ids=(9, 8))
    assert output.token_ids == [6, 7, EOS, 8]
    assert output.stop_reason == "stop"


def test_a_stop_token_at_the_limit_counts_as_stop():
    output = say(forced_model(5, 6, 7, EOS, 8), [5], max_tokens=3)
    assert output.token_ids == [6, 7, EOS]
    assert output.stop_reason == "stop"


def test_a_stop_text_ends_it_and_what_was_computed_after_it_is_cut_off():
    output = say(forced_model(5, 6, 7, 8, 9, EOS), [5], stop=("7><8",), max_tokens=9)
    assert output.token_ids == [6, 7, 8]
    assert len(output.log_probs) == len(output.policy_versions) == 3
    assert output.stop_reason == "stop"


def test_the_engine_never_says_more_than_it_has_room_for():
    output = say(forced_model(5, 6, 7), [5], max_tokens=1000)
    assert len(output.token_ids) == 16
    assert output.stop_reason == "length"


def test_the_repetition_penalty_counts_prompt_and_response(model):
    """With a huge penalty nothing is said twice, as long as there is something new to say."""
    params = SamplingParams(temperature=0, repetition_penalty=1e6, max_tokens=14, ignore_eos=True)
    engine = build_engine(model)
    prompts = [[5, 6, 7], [9, 10], [11], [12]]
    outputs = engine.generate_batch([request(p, params, str(p)) for p in prompts])
    for prompt, (output,) in zip(prompts, outputs, strict=True):
        assert len({*prompt, *output.token_ids}) == len(prompt) + 14


def test_an_aborted_request_keeps_what_it_has_and_frees_its_slots(model, alone):
    engine = build_engine(model, decode_text=decode)
    requests = pool()
    running = [engine.core.add(r) for r in requests[:8]]
    engine.core.step()
    for number in range(8):
        engine.core.abort(str(number))
    assert_nothing_is_left(engine)
    for one, expected in zip(running, alone[:8], strict=True):
        assert_same(one.outputs, expected)


def test_sleep_gives_memory_back_and_the_engine_wakes_up_when_needed(model, alone):
    engine = build_engine(model, decode_text=decode)
    assert_same(engine.generate_batch([pool()[0]])[0], alone[0])
    assert engine.core.cache.num_bytes > 0
    engine.sleep()
    assert engine.core.cache.num_bytes == 0
    engine.wake_up()
    assert_same(engine.generate_batch([pool()[0]])[0], alone[0])


def test_an_engine_that_is_busy_refuses_to_sleep(model):
    engine = build_engine(model)
    engine.core.add(request([5], SamplingParams(max_tokens=9)))
    with pytest.raises(RuntimeError, match="1 requests are not finished"):
        engine.sleep()
    engine.core.step()
    with pytest.raises(RuntimeError, match="not finished"):
        engine.sleep()
    engine.core.abort("r")
    engine.sleep()


def test_a_response_that_ends_for_no_reason_is_an_error(model):
    engine = build_engine(model)
    engine.core.add(request([5, 6], SamplingParams(max_tokens=16, ignore_eos=True, seed=1)))
    engine.core.step()
    engine.core.batch._table.is_done[0] = True
    with pytest.raises(RuntimeError, match=r"ended after \d+ of 16 tokens without a stop token"):
        engine.core.step()

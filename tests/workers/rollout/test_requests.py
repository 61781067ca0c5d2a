"""What the engine refuses, how many sequences fit, and where a text ends a response."""

import logging

import pytest

from tests.workers.rollout.helpers import LIMITS, build_engine, request
from verl.workers.rollout.base import SamplingParams
from verl.workers.rollout.native.engine import EngineLimits
from verl.workers.rollout.native.sequence import tokens_until_stop

PARAMS = SamplingParams(max_tokens=4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_ids": []}, "empty prompt"),
        ({"prompt_ids": [3] * 28}, r"prompt of 28 tokens.*28 together.*rollout.prompt_length"),
        ({"prompt_ids": [96]}, "outside the vocabulary of 96"),
        ({"prompt_ids": [-1]}, "outside the vocabulary of 96"),
        ({"num_samples": 0}, "0 samples"),
        ({"num_samples": 2, "seeds": (1,)}, "1 seeds for 2 samples"),
        ({"session_ids": ("a", "b")}, "2 session_ids for 1 samples"),
        ({"params": SamplingParams(stop=("x",))}, "no tokenizer"),
        ({"params": SamplingParams(stop_token_ids=tuple(range(3, 40)))}, "38 tokens.*32 at most"),
    ],
)
def test_a_request_that_cannot_run_is_refused_by_name(options, message):
    engine = build_engine()
    with pytest.raises(ValueError, match=f"request faulty.*{message}"):
        engine.core.add(
            request(**{"prompt_ids": [3], "params": PARAMS, "request_id": "faulty", **options})
        )
    assert not engine.core.scheduler.unfinished


def test_a_refused_request_takes_the_rest_of_its_batch_along():
    engine = build_engine()
    with pytest.raises(ValueError, match="empty prompt"):
        engine.generate_batch([request([3], PARAMS), request([], PARAMS)])
    assert not engine.core.scheduler.unfinished


def test_a_limit_below_one_is_refused_by_name():
    with pytest.raises(ValueError, match="tokens_per_step is 0"):
        EngineLimits(tokens_per_step=0)


# The tiny llama keeps 2 layers x (8 + 8 numbers) x 2 KV heads x 4 bytes = 256 bytes of a token.
BYTES_PER_SEQUENCE = 256 * (12 + 16)


def limits(num_bytes):
    return EngineLimits(
        max_num_seqs=8, max_prompt_tokens=12, max_response_tokens=16, max_cache_bytes=num_bytes
    )


def test_the_memory_bounds_how_many_sequences_run_at_once(caplog):
    with caplog.at_level(logging.WARNING):
        engine = build_engine(limits=limits(3 * BYTES_PER_SEQUENCE + 1))
    assert "3 sequences run at once instead of rollout.max_num_seqs=8" in caplog.text
    outputs = engine.generate_batch([request([3 + i], PARAMS, str(i)) for i in range(7)])
    assert len(outputs) == 7
    assert engine.core.cache.num_bytes == 3 * BYTES_PER_SEQUENCE


def test_memory_for_less_than_one_sequence_is_refused_and_says_what_to_lower():
    with pytest.raises(ValueError, match=r"7,168 bytes.*7,000; lower rollout.prompt_length"):
        build_engine(limits=limits(7000))


def test_slots_are_made_as_sequences_come():
    engine = build_engine(limits=EngineLimits(max_num_seqs=256))
    assert engine.core.cache.num_bytes == 0
    engine.generate_batch([request([3], PARAMS, num_samples=3)])
    # One prompt slot, three for responses.
    assert engine.core.cache.num_bytes == 256 * (512 + 3 * 512)


def test_more_samples_than_slots_take_turns():
    many = SamplingParams(max_tokens=5, seed=3)
    (samples,) = build_engine().generate_batch([request([3, 4], many, num_samples=20)])
    assert len(samples) == 20
    roomy = build_engine(limits=EngineLimits(max_num_seqs=32))
    (expected,) = roomy.generate_batch([request([3, 4], many, num_samples=20)])
    assert [s.token_ids for s in samples] == [s.token_ids for s in expected]
    assert LIMITS.max_num_seqs < 20


PIECES = ["a", "b", "END", "E", "ND", " ", "é", "xENDy"]


def decode(ids):
    return "".join(PIECES[i] for i in ids)


def end_of(ids, num_new, *stop):
    return tokens_until_stop(ids, num_new, stop, decode)


def test_the_token_that_completes_the_text_is_the_last():
    assert end_of([0, 1, 2, 0, 0], 5, "END") == 3
    assert end_of([0, 3, 4, 1], 4, "END") == 3  # in two pieces
    assert end_of([0, 7, 1], 3, "END") == 2  # in the middle of a piece


def test_a_text_that_began_before_the_new_tokens_counts():
    assert end_of([0, 1, 3, 4], 1, "END") == 4
    assert end_of([0] * 30 + [5, 3, 4, 1, 1], 3, "a END") == 33


def test_the_first_of_several_texts_ends_it():
    assert end_of([0, 1, 6, 2], 4, "END", "é") == 3


def test_without_the_text_there_is_no_end():
    assert end_of([0, 1, 3, 1, 4], 5, "END") is None

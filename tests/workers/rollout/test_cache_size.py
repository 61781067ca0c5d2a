"""Slots where all fit, pages where they do not, and a word about it."""

import logging

import pytest

from tests.tiny_models import tiny_model
from verl.workers.rollout.native.cache import slots_or_pages, slots_that_fit
from verl.workers.rollout.native.model_runner import ModelRunner
from verl.workers.rollout.native.pages import PAGE
from verl.workers.rollout.native.sequence import EngineLimits

TOKEN_BYTES = 2 * 2 * 8 * 2 * 4  # layers, KV heads, head dim, keys and values, fp32


@pytest.fixture(scope="module")
def runner():
    return ModelRunner(tiny_model("llama"))


def limits(max_cache_bytes, **changes):
    sizes = {"max_num_seqs": 4, "max_prompt_tokens": 50, "max_response_tokens": 100, **changes}
    return EngineLimits(max_cache_bytes=max_cache_bytes, **sizes)


def fit(layout, runner, limits):
    return layout(runner.slot_shape(limits), limits)


def test_slots_are_used_if_as_many_fit_as_are_asked_for(runner):
    size = fit(slots_or_pages, runner, limits(4 * 150 * TOKEN_BYTES))
    assert (size.is_paged, size.num_slots, size.num_rows) == (False, 4, 4)
    assert (size.shape.max_prompt_tokens, size.shape.max_response_tokens) == (50, 100)


def test_with_a_byte_less_the_memory_is_cut_into_pages_and_that_is_said(runner, caplog):
    with caplog.at_level(logging.WARNING):
        size = fit(slots_or_pages, runner, limits(4 * 150 * TOKEN_BYTES - 1))
    assert (size.is_paged, size.num_slots, size.num_rows) == (True, 600 // PAGE, 4)
    assert size.shape.bytes_per_sequence == PAGE * TOKEN_BYTES
    (record,) = caplog.records
    assert "up to 4 sequences" in record.message
    assert f"{9 * PAGE} tokens" in record.message
    assert "enough for 3 at full length" in record.message


def test_without_pages_fewer_sequences_run_and_that_is_said(runner, caplog):
    with caplog.at_level(logging.WARNING):
        size = fit(slots_that_fit, runner, limits(4 * 150 * TOKEN_BYTES - 1))
    assert (size.is_paged, size.num_slots, size.num_rows) == (False, 3, 3)
    (record,) = caplog.records
    assert "3 sequences run at once instead of rollout.max_num_seqs=4" in record.message


@pytest.mark.parametrize("num_tokens", [149, 150, 255])
def test_a_sequence_that_could_not_finish_alone_is_refused(runner, num_tokens):
    """150 tokens take three pages, and one more is nobody's."""
    with pytest.raises(ValueError, match=r"rollout\.response_length.*gpu_memory_utilization"):
        fit(slots_or_pages, runner, limits(num_tokens * TOKEN_BYTES))


def test_four_pages_are_enough_for_a_sequence_of_three(runner):
    assert fit(slots_or_pages, runner, limits(256 * TOKEN_BYTES)).num_slots == 4

"""Measuring the largest micro-batch: the size is right, and nothing of the measurement remains."""

import logging

import pytest
import torch

from tests.tiny_models import tiny_model
from tests.workers.engine.test_one_device import batch, weighted_sum
from verl.config.optimizer import FSDPOptimizerConfig
from verl.workers.engine.base import MicroBatching
from verl.workers.engine.memory import (
    DeviceMemory,
    MemoryOptions,
    full_rows,
    probe_token_budget,
)
from verl.workers.engine.one_device import OneDeviceEngine

CUT = MicroBatching(rows=1)


class CountedMemory(DeviceMemory):
    """A device of 1000 bytes on which a pass takes 100 bytes and 1 for each of its tokens."""

    total_bytes = 1000

    def __init__(self):
        self.sizes = []

    def reset_peak(self):
        self.num_tokens = 0

    def peak_bytes(self):
        return 100 + self.num_tokens

    def run(self, num_tokens):
        self.num_tokens = max(self.num_tokens, num_tokens)
        self.sizes.append(num_tokens)
        if num_tokens > 900:
            raise torch.OutOfMemoryError("1000 bytes")


def probe(memory, **options):
    options = {"row_tokens": 10, "start_tokens": 100, "max_tokens": 10**6, **options}
    return probe_token_budget(lambda rows: memory.run(10 * rows), memory, **options)


def test_sizes_grow_by_a_quarter_until_nine_tenths_are_in_use():
    memory = CountedMemory()
    assert probe(memory) == 780, "880 bytes; the next size, 970, does not fit"
    assert memory.sizes == [10, 100, 120, 150, 180, 220, 270, 330, 410, 510, 630, 780, 970]


def test_what_will_be_allocated_later_is_left_free():
    assert probe(CountedMemory(), bytes_to_come=400) <= 400
    assert probe(CountedMemory(), bytes_to_come=400) * 1.25 > 400


def test_nothing_larger_than_the_mini_batch_is_tried():
    memory = CountedMemory()
    assert probe(memory, max_tokens=145) == 150, "rows are whole: fifteen hold 145 tokens"
    assert max(memory.sizes) == 150
    assert probe(CountedMemory(), max_tokens=30) == 30


def test_a_configured_size_that_does_not_fit_is_lowered():
    found = probe(CountedMemory(), start_tokens=900)
    assert 640 <= found <= 800
    assert probe(CountedMemory(), start_tokens=5000) <= 800, "also where the pass itself fails"


def test_one_row_is_the_least():
    assert probe(CountedMemory(), row_tokens=10, start_tokens=10, bytes_to_come=10**6) == 10


def test_full_rows_are_as_long_as_the_batch_allows_and_differ_from_each_other():
    data = batch()
    rows = full_rows(data, 3, vocabulary=50)
    assert rows["input_ids"].shape == (3, data["input_ids"].shape[1])
    assert rows["responses"].shape == (3, data["responses"].shape[1])
    assert rows["attention_mask"].all()
    assert int(rows["input_ids"].max()) < 50
    assert not torch.equal(rows["input_ids"][0], rows["input_ids"][1])


def engine(memory=None, **options):
    built = OneDeviceEngine(
        lambda: tiny_model("llama"),
        FSDPOptimizerConfig(lr=0.1, optimizer="SGD", weight_decay=0.0),
        max_grad_norm=1e9,
        memory=MemoryOptions(probe_micro_batch=True),
        device_memory=memory,
        **options,
    )
    built.initialize()
    if memory is not None:
        built.module.get_input_embeddings().register_forward_hook(
            lambda _, args, __: memory.run(args[0].shape[1])
        )
    return built


def test_the_first_update_measures_once_and_later_micro_batches_have_the_size_found(caplog):
    memory = CountedMemory()
    memory.total_bytes = 145  # rows have up to 14 tokens: 28 fit, 42 do not
    probed = engine(memory)
    with caplog.at_level(logging.WARNING):
        first = probed.train_batch(batch(), weighted_sum, micro_batching=CUT)
    assert "up to 28 tokens (2 rows of 14)" in caplog.text
    assert first.num_micro_batches == 2, "42 tokens in passes of at most 28, not one row at a time"
    num_passes = len(memory.sizes)
    second = probed.train_batch(batch(), weighted_sum, micro_batching=CUT)
    assert len(memory.sizes) == num_passes + second.num_micro_batches
    assert max(memory.sizes[num_passes:]) <= 28


def test_measuring_leaves_no_trace_in_the_step():
    plain = OneDeviceEngine(
        lambda: tiny_model("llama"),
        FSDPOptimizerConfig(lr=0.1, optimizer="SGD", weight_decay=0.0),
        max_grad_norm=1e9,
    )
    plain.initialize()
    probed = engine(CountedMemory())
    results = [b.train_batch(batch(), weighted_sum, micro_batching=CUT) for b in (plain, probed)]
    assert results[1].num_micro_batches == 1 < results[0].num_micro_batches
    assert results[1].grad_norm == pytest.approx(results[0].grad_norm, rel=1e-5)
    assert probed.policy_version == 1
    for a, b in zip(probed.module.parameters(), plain.module.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_where_there_is_nothing_to_measure_the_configured_size_stays_and_it_is_said(caplog):
    built = engine()
    for _ in range(2):
        assert built.train_batch(batch(), weighted_sum, micro_batching=CUT).num_micro_batches == 7
    assert caplog.text.count("probe_micro_batch has no effect") == 1


def test_nothing_is_traded_for_memory_unless_it_is_asked_for():
    assert not any(vars(MemoryOptions()).values())

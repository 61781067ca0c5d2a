"""Sizes for which work is captured: few of them, and little work in vain."""

import itertools

from verl.workers.rollout.native.model_runner import batch_sizes, prefill_sizes


def test_sizes_go_up_to_the_largest_number_that_can_come():
    assert batch_sizes(40) == [8, 12, 16, 24, 32, 40]
    assert prefill_sizes(200) == [64, 96, 128, 192, 200]
    assert prefill_sizes(5000)[-4:] == [3072, 4096, 4608, 5000]
    assert prefill_sizes(64) == [64]
    assert prefill_sizes(10) == [10]


def test_a_prefill_computes_a_third_in_vain_at_most_and_an_eighth_where_it_is_large():
    sizes = prefill_sizes(100_000)
    for below, size in itertools.pairwise(sizes):
        in_vain = size - (below + 1)
        assert in_vain <= size / (8 if size > 4096 else 3)
    assert len(sizes) < 60

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.utils.partition import (
    best_fit_decreasing,
    even_out_by_swaps,
    greedy_partition,
    karmarkar_karp,
)

LENGTHS = st.lists(st.integers(0, 1000), min_size=1, max_size=60)
DIVIDERS = [karmarkar_karp, greedy_partition]


def sums(lengths, parts) -> list[int]:
    return sorted(sum(lengths[i] for i in part) for part in parts)


def test_differencing_by_hand():
    # 8 and 7 differ by 1, with 6 by 5, with 5 by 0, with 4 by 4
    assert sums([8, 7, 6, 5, 4], karmarkar_karp([8, 7, 6, 5, 4], 2, equal_size=False)) == [14, 16]
    # three parts: {4, 5}, {1, 8}, {2, 7}
    assert sums([1, 2, 4, 5, 7, 8], karmarkar_karp([1, 2, 4, 5, 7, 8], 3, equal_size=False)) == [
        9, 9, 9,
    ]  # fmt: skip


def test_greedy_by_hand():
    # 8 | 7, then 6 to 7, 5 to 8, 4 to the tie at 13
    assert sums([8, 7, 6, 5, 4], greedy_partition([8, 7, 6, 5, 4], 2, equal_size=False)) == [13, 17]


@pytest.mark.parametrize("divide", DIVIDERS)
@given(lengths=LENGTHS, data=st.data())
def test_every_index_is_in_exactly_one_part_and_no_part_is_empty(divide, lengths, data):
    k = data.draw(st.integers(1, len(lengths)))
    parts = divide(lengths, k, equal_size=False)
    assert len(parts) == k
    assert all(parts)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))


@pytest.mark.parametrize("divide", DIVIDERS)
@given(k=st.integers(1, 6), size=st.integers(1, 6), data=st.data())
def test_parts_of_equal_size_have_equally_many(divide, k, size, data):
    lengths = data.draw(st.lists(st.integers(0, 99), min_size=k * size, max_size=k * size))
    parts = divide(lengths, k, equal_size=True)
    assert {len(part) for part in parts} == {size}
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))


@given(lengths=st.lists(st.integers(1, 50), min_size=2, max_size=60), k=st.integers(2, 5))
def test_no_part_exceeds_the_lightest_by_more_than_the_longest_sequence(lengths, k):
    if len(lengths) < k:
        return
    for divide in DIVIDERS:
        found = sums(lengths, divide(lengths, k, equal_size=False))
        assert found[-1] - found[0] <= max(lengths)


@given(lengths=st.lists(st.integers(1, 100), min_size=1, max_size=80), spare=st.integers(0, 200))
def test_bins_are_never_over_full_and_at_most_one_is_half_empty(lengths, spare):
    capacity = max(lengths) + spare
    parts = best_fit_decreasing(lengths, capacity)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    found = sums(lengths, parts)
    assert found[-1] <= capacity
    assert sum(2 * total <= capacity for total in found) <= 1


def test_a_swap_moves_half_the_gap():
    # 12 against 4: trading 5 for 1 makes both 8
    assert sums([5, 7, 1, 3], even_out_by_swaps([5, 7, 1, 3], [[0, 1], [2, 3]])) == [8, 8]
    assert even_out_by_swaps([4, 4], [[0], [1]]) == [[0], [1]]


@given(k=st.integers(1, 5), size=st.integers(1, 6), data=st.data())
def test_swaps_keep_sizes_and_never_make_the_heaviest_part_heavier(k, size, data):
    lengths = data.draw(st.lists(st.integers(0, 99), min_size=k * size, max_size=k * size))
    before = [list(range(part * size, (part + 1) * size)) for part in range(k)]
    after = even_out_by_swaps(lengths, before)
    assert {len(part) for part in after} == {size}
    assert sorted(i for part in after for i in part) == list(range(k * size))
    assert sums(lengths, after)[-1] <= sums(lengths, before)[-1]


@pytest.mark.parametrize("divide", DIVIDERS)
def test_impossible_divisions_are_refused(divide):
    with pytest.raises(ValueError, match="2 sequences cannot be divided into 3 parts"):
        divide([1, 2], 3, equal_size=False)
    with pytest.raises(ValueError, match="3 sequences cannot be divided into 2 parts of equal"):
        divide([1, 2, 3], 2, equal_size=True)


def test_eight_thousand_sequences_in_64_parts_take_less_than_a_second():
    lengths = np.random.default_rng(0).lognormal(6, 1, 8192).astype(int).tolist()
    start = time.process_time()
    found = sums(lengths, karmarkar_karp(lengths, 64, equal_size=False))
    assert time.process_time() - start < 1
    assert found[-1] - found[0] <= 2

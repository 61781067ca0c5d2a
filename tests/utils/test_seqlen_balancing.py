import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from verl.protocol import DataProto
from verl.utils.seqlen_balancing import (
    _split,
    best_fit_decreasing,
    calculate_workload,
    ceildiv,
    even_out_by_swaps,
    get_group_balanced_partitions,
    get_reverse_idx,
    get_seqlen_balanced_partitions,
    greedy_partition,
    karmarkar_karp,
    log_seqlen_unbalance,
    prepare_dynamic_batch,
    rearrange_micro_batches,
    restore_dynamic_batch,
    roundup_divisible,
)


def batch_of(lengths: list[int]) -> TensorDict:
    """Row i holds i in its real positions."""
    width = max([*lengths, 1])
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    ids = torch.arange(len(lengths))[:, None] * mask
    return TensorDict({"input_ids": ids, "attention_mask": mask}, batch_size=len(lengths))


def tokens(lengths: list[int], parts: list[list[int]]) -> list[int]:
    return [sum(lengths[i] for i in part) for part in parts]


def test_integer_helpers():
    assert [ceildiv(7, 2), ceildiv(8, 2)] == [4, 4]
    assert [roundup_divisible(7, 4), roundup_divisible(8, 4)] == [8, 8]
    assert get_reverse_idx([2, 0, 1]) == [1, 2, 0]


def test_workload_grows_with_the_square_of_the_length():
    assert calculate_workload([0, 1, 2]).tolist() == [0, 24577, 49156]
    assert calculate_workload(torch.tensor([24576])).tolist() == [2 * 24576**2]


def test_parts_are_sorted_and_balanced():
    assert get_seqlen_balanced_partitions([5, 1, 4, 2], 2, equal_size=True) in (
        [[0, 1], [2, 3]],
        [[2, 3], [0, 1]],
    )


def test_one_very_long_sequence_is_met_by_short_ones_when_sizes_are_equal():
    lengths = [1000] + [10] * 50 + [30] * 49
    parts = get_seqlen_balanced_partitions(lengths, 2, equal_size=True)
    assert [len(part) for part in parts] == [50, 50]
    assert sorted(tokens(lengths, parts)) == [1480, 1490]


def test_balancing_eight_thousand_sequences_over_64_ranks_takes_less_than_a_second():
    lengths = np.random.default_rng(0).lognormal(6, 1, 8192).astype(int).tolist()
    start = time.thread_time()
    found = tokens(lengths, get_seqlen_balanced_partitions(lengths, 64, equal_size=True))
    assert time.thread_time() - start < 1
    assert max(found) - min(found) <= 4


def test_groups_stay_together_and_are_balanced():
    lengths = [4, 4, 1, 1, 3, 3, 2, 2]
    uids = ["a", "a", "b", "b", "c", "c", "d", "d"]
    parts = get_group_balanced_partitions(lengths, uids, 2)
    assert sorted(parts) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_groups_of_different_size_stay_together():
    lengths = [1] * 6
    uids = np.array([1, 2, 1, 3, 1, 3], dtype=object)
    assert sorted(get_group_balanced_partitions(lengths, uids, 2)) == [[0, 2, 4], [1, 3, 5]]
    with pytest.raises(ValueError, match="3 groups cannot be divided into 4 parts"):
        get_group_balanced_partitions(lengths, uids, 4)
    with pytest.raises(ValueError, match="6 lengths and 5 uids"):
        get_group_balanced_partitions(lengths, uids[:5], 2)


def test_the_gain_from_balancing_is_reported():
    assert log_seqlen_unbalance([5, 4, 2, 1], [[0, 3], [1, 2]], prefix="global_seqlen") == {
        "global_seqlen/min": 3,
        "global_seqlen/max": 9,
        "global_seqlen/minmax_diff": 6,
        "global_seqlen/balanced_min": 6,
        "global_seqlen/balanced_max": 6,
        "global_seqlen/mean": 6,
    }


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=40),
    spare=st.integers(0, 100),
    balance=st.booleans(),
)
def test_no_micro_batch_is_above_the_budget_and_no_row_is_lost(lengths, spare, balance):
    budget = max([*lengths, 1]) + spare
    micro_batches, parts = rearrange_micro_batches(
        batch_of(lengths), budget, use_dynamic_bsz_balance=balance
    )
    assert max(tokens(lengths, parts)) <= budget
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    for micro_batch, part in zip(micro_batches, parts, strict=True):
        assert micro_batch["attention_mask"].sum(-1).tolist() == [lengths[i] for i in part]
    assert len(parts) <= max(1, 2 * sum(lengths) // budget + 1)


def test_there_are_as_few_micro_batches_as_fit():
    lengths = [6, 6, 6, 4, 4, 4]  # 30 tokens; three pairs of 10
    assert sorted(tokens(lengths, rearrange_micro_batches(batch_of(lengths), 10)[1])) == [
        10,
        10,
        10,
    ]
    lengths = [6, 6, 6]  # 18 tokens would be two times 9, but no two fit
    assert tokens(lengths, rearrange_micro_batches(batch_of(lengths), 10)[1]) == [6, 6, 6]


def test_the_budget_is_kept_where_balancing_would_break_it():
    lengths = [8, 9, 6, 6, 7]  # 9 + 8 and 7 + 6 + 6; an even 20 and 16 does not fit
    _, parts = rearrange_micro_batches(batch_of(lengths), 19)
    assert sorted(tokens(lengths, parts)) == [17, 19]


def test_parts_are_halved_where_more_are_wanted():
    parts = _split([5, 1, 1, 1, 9], [[0, 1], [2, 3], [4]], num_parts=4)
    assert sorted(parts) == [[0], [1], [2, 3], [4]]


def test_the_number_of_micro_batches_can_be_raised():
    lengths = [2] * 8
    assert len(rearrange_micro_batches(batch_of(lengths), 100)[1]) == 1
    assert len(rearrange_micro_batches(batch_of(lengths), 100, min_num_micro_batch=3)[1]) == 3
    assert len(rearrange_micro_batches(batch_of(lengths), 8, num_batches_divided_by=3)[1]) == 3
    assert len(rearrange_micro_batches(batch_of(lengths), 4, num_batches_divided_by=3)[1]) == 6


def test_the_budget_holds_when_the_number_is_raised():
    lengths = [9, 9, 9, 9, 1, 1, 1, 1]
    for num_micro in range(4, 9):
        _, parts = rearrange_micro_batches(batch_of(lengths), 10, min_num_micro_batch=num_micro)
        assert len(parts) == num_micro
        assert max(tokens(lengths, parts)) <= 10


def test_the_heaviest_micro_batch_is_in_the_middle():
    lengths = [5, 4, 3, 2, 1]
    _, parts = rearrange_micro_batches(batch_of(lengths), 5, min_num_micro_batch=5)
    assert tokens(lengths, parts) == [1, 3, 5, 4, 2]


def test_a_sequence_above_the_budget_is_named():
    with pytest.raises(ValueError, match=r"sequence 1 has 9 tokens.*max_token_len 8"):
        rearrange_micro_batches(batch_of([3, 9]), 8)


def test_more_micro_batches_than_sequences_are_refused():
    with pytest.raises(ValueError, match="3 micro-batches are needed and a rank has only 2"):
        rearrange_micro_batches(batch_of([3, 3]), 8, min_num_micro_batch=3)
    with pytest.raises(ValueError, match="only 0 sequences"):
        rearrange_micro_batches(batch_of([3])[:0], 8)


def test_jagged_ids_need_no_mask():
    rows = [torch.full((length,), i) for i, length in enumerate([3, 1, 2])]
    ids = torch.nested.nested_tensor(rows, layout=torch.jagged)
    micro_batches, parts = rearrange_micro_batches(TensorDict({"input_ids": ids}, batch_size=3), 3)
    assert sorted(map(sorted, parts)) == [[0], [1, 2]]
    joined = [row for part in micro_batches for row in part["input_ids"].unbind()]
    jagged = torch.nested.nested_tensor(joined, layout=torch.jagged)
    restored = restore_dynamic_batch(jagged, parts)
    assert [row.tolist() for row in restored.unbind()] == [[0, 0, 0], [1], [2, 2]]


@given(st.lists(st.integers(1, 20), min_size=1, max_size=20))
def test_a_data_proto_survives_the_way_there_and_back(lengths):
    columns = dict(batch_of(lengths).items())
    data = DataProto.from_dict(columns, non_tensors={"uid": np.array(lengths, dtype=object)})
    micro_batches, parts = prepare_dynamic_batch(data, max_token_len=25)
    for micro_batch in micro_batches:
        counted = micro_batch.batch["attention_mask"].sum(-1)
        assert counted.tolist() == list(micro_batch.non_tensor_batch["uid"])
        assert counted.sum() <= 25
    joined = torch.cat([micro_batch.batch["input_ids"] for micro_batch in micro_batches])
    assert torch.equal(restore_dynamic_batch(joined, parts), columns["input_ids"])


def test_results_that_do_not_match_the_rows_are_refused():
    with pytest.raises(ValueError, match="2 rows do not match 3 indices"):
        restore_dynamic_batch(torch.zeros(2), [[0, 2], [1]])


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
    start = time.thread_time()
    found = sums(lengths, karmarkar_karp(lengths, 64, equal_size=False))
    assert time.thread_time() - start < 1
    assert found[-1] - found[0] <= 2

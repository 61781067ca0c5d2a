"""One plan for all ranks: the same steps for every number of ranks, equally many passes on each."""

import json
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.workers.schedule import (
    InferencePlan,
    MicroBatching,
    UpdatePlan,
    pack_by_tokens,
    plan_inference,
    plan_update,
    split_by_count,
)

BY_TWO_ROWS = MicroBatching(rows=2)

lengths_of_rows = st.lists(st.integers(1, 50), min_size=1, max_size=40)
ranks = st.integers(1, 5)
micro_batchings = st.one_of(
    st.builds(MicroBatching, rows=st.integers(1, 6)),
    st.builds(MicroBatching, tokens=st.integers(50, 120)),
)
orders = st.fixed_dictionaries(
    {
        "rows_per_step": st.integers(1, 45),
        "epochs": st.integers(1, 3),
        "shuffle_seed": st.one_of(st.none(), st.integers(0, 5)),
    }
)


def rows_of_step(plan, step):
    """Rows of the batch in one optimizer step, over all ranks and passes."""
    return sorted(
        plan.rows_of(rank)[index]
        for rank in range(plan.num_ranks)
        for part in step.passes[rank]
        for index in part
    )


def test_two_ranks_share_the_tokens_of_every_step():
    plan = plan_update(
        [9, 1, 8, 2, 5, 5, 3],
        [4, 0, 3, 1, 2, 2, 1],
        rows_per_step=4,
        micro_batching=BY_TWO_ROWS,
        num_ranks=2,
    )
    # Step 0 has rows 0-3: 9 + 1 and 8 + 2. Step 1 has rows 4-6: 5 and 5, and 3 to the first rank.
    assert plan.order == [0, 1, 4, 6, 2, 3, 5, 1]
    assert plan.padding == [7]  # the shortest row again, which no pass has
    first, second = plan.steps
    assert first.passes == [[[0, 1]], [[0, 1]]]
    assert second.passes == [[[2, 3]], [[2]]]
    assert (first.batch_num_tokens, first.global_batch_size) == (8, 3)
    assert (second.batch_num_tokens, second.global_batch_size) == (5, 3)
    assert plan.indices == [0, 1, 4, 5, 2, 6, 3]


@given(lengths_of_rows, ranks, micro_batchings, orders)
def test_every_row_is_computed_once_per_epoch_and_padding_never(
    lengths, num_ranks, micro_batching, order
):
    plan = plan_update(
        lengths, lengths, micro_batching=micro_batching, num_ranks=num_ranks, **order
    )
    times = [row for step in plan.steps for row in rows_of_step(plan, step)]
    assert sorted(times) == sorted(list(range(len(lengths))) * order["epochs"])
    size = -(-len(lengths) // num_ranks)  # no more padding than it takes
    assert len(plan.order) == size * num_ranks
    used = {
        rank * size + index
        for step in plan.steps
        for rank, passes in enumerate(step.passes)
        for part in passes
        for index in part
    }
    assert used.isdisjoint(plan.padding)
    assert used | set(plan.padding) == set(range(len(plan.order)))
    assert [plan.order[index] for index in plan.indices] == list(range(len(lengths)))


@given(lengths_of_rows, ranks, micro_batchings, orders)
def test_the_rows_and_counts_of_a_step_do_not_depend_on_the_number_of_ranks(
    lengths, num_ranks, micro_batching, order
):
    responses = [n // 3 for n in lengths]
    one, many = (
        plan_update(lengths, responses, micro_batching=micro_batching, num_ranks=n, **order)
        for n in (1, num_ranks)
    )
    assert one.order == list(range(len(lengths)))  # a single rank takes the batch as it is
    for a, b in zip(one.steps, many.steps, strict=True):
        rows = rows_of_step(one, a)
        assert rows == rows_of_step(many, b)
        assert b.batch_num_tokens == sum(responses[row] for row in rows)
        assert b.global_batch_size == sum(responses[row] > 0 for row in rows)


@given(lengths_of_rows, ranks, micro_batchings, orders)
def test_all_ranks_make_equally_many_passes_within_the_limit(
    lengths, num_ranks, micro_batching, order
):
    plan = plan_update(
        lengths, lengths, micro_batching=micro_batching, num_ranks=num_ranks, **order
    )
    for step in plan.steps:
        assert len({len(passes) for passes in step.passes}) == 1
        assert any(passes[-1] for passes in step.passes), "a pass that is empty everywhere"
        for rank, passes in enumerate(step.passes):
            for part in passes:
                tokens = sum(lengths[plan.rows_of(rank)[index]] for index in part)
                assert len(part) <= (micro_batching.rows or len(part))
                assert tokens <= (micro_batching.tokens or tokens)


@given(lengths_of_rows, ranks, st.integers(1, 4))
def test_groups_stay_on_one_rank_and_in_one_pass_where_they_fit(lengths, num_ranks, group_size):
    groups = [row // group_size for row in range(len(lengths))]
    plan = plan_inference(
        lengths, micro_batching=MicroBatching(tokens=60), num_ranks=num_ranks, groups=groups
    )
    micro_batches_of: dict[int, set[tuple[int, int]]] = {}
    for rank, passes in enumerate(plan.passes):
        for number, part in enumerate(passes):
            for index in part:
                row = plan.rows_of(rank)[index]
                micro_batches_of.setdefault(groups[row], set()).add((rank, number))
    for group, numbers in micro_batches_of.items():
        total = sum(n for n, label in zip(lengths, groups, strict=True) if label == group)
        assert len({rank for rank, _ in numbers}) == 1
        assert total > 60 or len(numbers) == 1


@given(lengths_of_rows, ranks, micro_batchings, orders)
def test_a_plan_survives_the_journey_as_plain_numbers(lengths, num_ranks, micro_batching, order):
    plan = plan_update(
        lengths, lengths, micro_batching=micro_batching, num_ranks=num_ranks, **order
    )
    assert UpdatePlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    passes = plan_inference(lengths, micro_batching=micro_batching, num_ranks=num_ranks)
    assert InferencePlan.from_dict(json.loads(json.dumps(passes.to_dict()))) == passes


def test_a_shuffle_gives_every_epoch_an_order_of_its_own_and_repeats_itself():
    options = {"rows_per_step": 5, "epochs": 2, "micro_batching": BY_TWO_ROWS}
    steps = [
        [rows_of_step(plan, step) for step in plan.steps]
        for plan in (
            plan_update([1] * 20, [1] * 20, shuffle_seed=seed, num_ranks=2, **options)
            for seed in (1, 1, 2)
        )
    ]
    assert steps[0] == steps[1] != steps[2]
    assert steps[0][:4] != steps[0][4:]


@pytest.mark.parametrize("shuffle_seed", [None, 3])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_units_stay_in_one_step_whatever_their_size(num_ranks, shuffle_seed):
    prompts = [0, 0, 1, 1, 1, 2, 3, 3, 4, 4]
    sessions = [0, 0, 1, 2, 3, 4, 5, 6, 7, 8]
    plan = plan_update(
        [2] * 10,
        [1] * 10,
        rows_per_step=2,
        micro_batching=BY_TWO_ROWS,
        num_ranks=num_ranks,
        shuffle_seed=shuffle_seed,
        groups=prompts,
        sessions=sessions,
        units=prompts,
    )
    steps = [rows_of_step(plan, step) for step in plan.steps]
    assert sorted(row for rows in steps for row in rows) == list(range(10))
    assert [len({prompts[row] for row in rows}) for rows in steps] == [2, 2, 1]
    of_prompts = [{prompts[row] for row in rows} for rows in steps]
    assert sum(map(len, of_prompts)) == len(set().union(*of_prompts))
    for step, rows in zip(plan.steps, steps, strict=True):
        assert step.global_batch_size == len({sessions[row] for row in rows})


def test_a_rank_without_rows_makes_empty_passes():
    plan = plan_inference([3, 4], micro_batching=MicroBatching(rows=1), num_ranks=3)
    assert sorted(map(tuple, (passes[0] for passes in plan.passes))) == [(), (0,), (0,)]
    assert len(plan.order) == 3


def test_tokens_are_balanced_across_ranks():
    lengths = np.random.default_rng(0).lognormal(6, 1, 4096).astype(int) + 1
    plan = plan_inference(lengths.tolist(), micro_batching=MicroBatching(rows=64), num_ranks=8)
    loads = [int(lengths[plan.rows_of(rank)].sum()) for rank in range(8)]
    assert max(loads) < 1.01 * min(loads)


def test_a_hundred_thousand_rows_are_planned_in_a_second():
    lengths = np.random.default_rng(0).lognormal(6, 1, 100_000).astype(int).clip(10, 8000).tolist()
    start = time.thread_time()
    plan_update(
        lengths,
        lengths,
        rows_per_step=8192,
        micro_batching=MicroBatching(tokens=16384),
        num_ranks=8,
    )
    assert time.thread_time() - start < 2.0  # 0.5 s on a free core


def test_rows_are_split_by_count_in_order():
    assert split_by_count(5, 2) == [[0, 1], [2, 3], [4]]
    assert split_by_count(0, 2) == []


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(50, 200))
def test_a_token_budget_holds_and_every_row_goes_through_once(lengths, max_tokens):
    parts = pack_by_tokens(lengths, max_tokens)
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    totals = [sum(lengths[row] for row in part) for part in parts]
    assert all(total <= max_tokens for total in totals)
    assert totals == sorted(totals, reverse=True)


def test_a_row_longer_than_the_budget_is_named():
    with pytest.raises(ValueError, match="row 1 has 30 tokens, more than the budget of 20"):
        pack_by_tokens([5, 30], 20)
    with pytest.raises(ValueError, match="row 2 has 30 tokens"):
        plan_update([5, 5, 30], [1, 1, 1], rows_per_step=2, micro_batching=MicroBatching(tokens=20))


def test_rows_that_do_not_match_are_refused():
    with pytest.raises(ValueError, match="3 lengths, 2 response lengths"):
        plan_update([1, 2, 3], [1, 2], rows_per_step=2, micro_batching=BY_TWO_ROWS)
    with pytest.raises(ValueError, match="at least one row"):
        plan_inference([], micro_batching=BY_TWO_ROWS)
    with pytest.raises(ValueError, match="set one"):
        MicroBatching(rows=1, tokens=1)

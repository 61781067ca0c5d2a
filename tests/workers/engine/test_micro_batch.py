import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.workers.engine.micro_batch import cut_by_count, cut_by_tokens


def test_rows_are_cut_by_count_in_order():
    assert cut_by_count(5, 2) == [[0, 1], [2, 3], [4]]
    assert cut_by_count(0, 2) == []


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(50, 200))
def test_a_token_budget_holds_and_every_row_goes_through_once(lengths, max_tokens):
    parts = cut_by_tokens(lengths, max_tokens)
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    assert all(sum(lengths[row] for row in part) <= max_tokens for part in parts)


def test_a_row_longer_than_the_budget_is_named():
    with pytest.raises(ValueError, match="row 1 has 30 tokens, more than the budget of 20"):
        cut_by_tokens([5, 30], 20)

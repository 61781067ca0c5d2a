"""Pages: whatever happens, each belongs to one holder or to nobody."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.workers.rollout.native.pages import PAGE, SCRATCH, PagePool, pages_for

HOLDERS = ["a", "b", "c", "d"]
CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.sampled_from(HOLDERS), st.integers(0, 5)),
        st.tuples(st.just("give back"), st.sampled_from(HOLDERS), st.just(0)),
        st.tuples(st.just("clear"), st.just(""), st.just(0)),
    ),
    max_size=40,
)


@given(num_pages=st.integers(1, 12), calls=CALLS)
def test_every_page_is_free_or_held_by_one_and_none_is_lost(num_pages, calls):
    pool, held = PagePool(num_pages), {}
    for call, holder, number in calls:
        if call == "clear":
            pool.clear()
            held.clear()
        elif call == "take" and number <= pool.num_free:
            before = list(held.get(holder, []))
            pool.take(holder, number)
            held[holder] = list(pool.held(holder))
            assert held[holder][: len(before)] == before, "pages that one has stay where they are"
            assert len(held[holder]) == len(before) + number
        elif call == "give back" and holder in held:
            pool.free(holder)
            del held[holder]
        in_use = [page for pages in held.values() for page in pages]
        assert len(in_use) == len(set(in_use))
        assert SCRATCH not in in_use
        assert len(in_use) + pool.num_free == pool.capacity == num_pages - 1


def test_pages_cannot_be_given_back_twice_or_taken_where_there_are_none():
    pool = PagePool(3)
    pool.take("a", 2)
    with pytest.raises(AssertionError, match="1 of 0 pages"):
        pool.take("b", 1)
    pool.free("a")
    with pytest.raises(KeyError):
        pool.free("a")
    assert pool.num_free == 2


def test_the_list_of_a_holder_grows_with_it_and_is_another_when_it_comes_back():
    pool = PagePool(5)
    pool.take("a", 1)
    first = pool.held("a")
    pool.take("a", 2)
    assert pool.held("a") is first
    assert len(first) == 3
    pool.free("a")
    pool.take("a", 3)
    assert pool.held("a") is not first


def test_a_page_is_counted_as_soon_as_one_token_is_in_it():
    assert [pages_for(n) for n in (0, 1, PAGE, PAGE + 1)] == [0, 1, 1, 2]

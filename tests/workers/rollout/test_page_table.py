"""The table of pages: what is held, and nobody's page everywhere else."""

import torch

from verl.workers.rollout.native.pages import SCRATCH, PagePool, PageTable


def build_table():
    pool = PagePool(20)
    pool.take("prompt", 2)
    pool.take("a", 1)
    pool.take("b", 2)
    table = PageTable(num_slots=4, num_blocks=5, device=torch.device("cpu"))
    return pool, table


def update(pool, table, **slots):
    table.update({slot: (pool.held("prompt"), pool.held(name)) for name, slot in slots.items()})
    return table.pages.tolist()


def row(pool, name):
    pages = [*pool.held("prompt"), *pool.held(name)]
    return pages + [SCRATCH] * (5 - len(pages))


NOTHING = [SCRATCH] * 5


def test_a_slot_leads_to_the_prompts_pages_and_then_to_its_own():
    pool, table = build_table()
    address = table.pages.data_ptr()
    assert update(pool, table, a=2, b=0) == [row(pool, "b"), NOTHING, row(pool, "a"), NOTHING]
    pool.take("a", 2)
    assert update(pool, table, a=2, b=0)[2] == row(pool, "a")
    assert SCRATCH not in table.pages[2].tolist()
    assert table.pages.data_ptr() == address, "captured steps find it where it was"


def test_a_slot_that_nobody_has_any_more_leads_to_nobodys_page():
    pool, table = build_table()
    update(pool, table, a=2, b=0)
    assert update(pool, table, b=0) == [row(pool, "b"), NOTHING, NOTHING, NOTHING]
    assert update(pool, table, b=3) == [NOTHING, NOTHING, NOTHING, row(pool, "b")]


def test_who_comes_back_to_its_slot_with_as_many_other_pages_is_noticed():
    pool, table = build_table()
    update(pool, table, a=2, b=0)
    before = pool.held("b")
    pool.free("b")
    pool.take("c", 1)
    pool.take("b", 2)
    assert pool.held("b") != before
    assert update(pool, table, a=2, b=0)[0] == row(pool, "b")


def test_one_takes_the_slot_of_another():
    pool, table = build_table()
    update(pool, table, b=1)
    assert update(pool, table, a=1) == [NOTHING, row(pool, "a"), NOTHING, NOTHING]


def test_after_a_reset_the_device_is_told_everything_again():
    pool, table = build_table()
    before = update(pool, table, a=2, b=0)
    table.reset()
    assert table.pages.tolist() == [NOTHING] * 4
    assert update(pool, table, a=2, b=0) == before

"""Admission and preemption where memory is pages; the pool of pages and the table of them."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.workers.rollout.test_scheduler import build_group
from verl.workers.rollout.native.pages import (
    PAGE,
    SCRATCH,
    PageBudget,
    PagePool,
    PageTable,
    SlotBudget,
    SlotPoolBudget,
    pages_for,
)
from verl.workers.rollout.native.scheduler import Scheduler
from verl.workers.rollout.native.sessions import KnownTokens, SessionStore


def build_budget(num_pages, *, num_rows=8, max_tokens=8 * PAGE, lookahead=8, num_kept=0):
    return PageBudget(
        num_pages,
        num_rows=num_rows,
        max_tokens=max_tokens,
        lookahead=lookahead,
        num_kept=num_kept,
    )


def paged_group(budget, name, num_samples, prompt_length, num_tokens):
    group = build_group(name, num_samples, prompt_length, num_tokens)
    group.num_shared = budget.most_shared(prompt_length)
    return group


def test_prompts_share_whole_blocks_only():
    budget = build_budget(20)
    assert [budget.most_shared(n) for n in (5, PAGE, PAGE + 1, 3 * PAGE - 1)] == [
        0, PAGE, PAGE, 2 * PAGE,
    ]  # fmt: skip


def test_a_group_is_no_larger_than_what_fits_at_full_length():
    # 12 pages: 2 for the prompt's whole blocks, and a sample takes 10 + 128 tokens, 3 pages.
    budget = build_budget(13)
    assert budget.most_samples(2 * PAGE + 10, 2 * PAGE) == 3
    assert budget.most_samples(2 * PAGE + 10, 10_000) == 1  # bounded by the longest sequence
    assert budget.most_samples(1, 1) == 8  # rows


def test_a_group_enters_with_pages_for_its_prompt_and_for_the_first_token_of_each_sample():
    budget = build_budget(40)
    group = paged_group(budget, "a", 2, 2 * PAGE + 63, 4 * PAGE)
    budget.begin_admission([])
    budget.admit(group)
    assert len(budget.pool.held(group)) == 2
    assert [len(budget.pool.held(sample)) for sample in group.samples] == [1, 1]
    first, second = (budget.pages_of(sample) for sample in group.samples)
    assert first[:2] == second[:2]
    assert first[2] != second[2]


def test_the_share_of_pages_in_use_is_told():
    budget = build_budget(9)  # 8 beside the one that is nobody's
    group = paged_group(budget, "a", 2, 3 * PAGE, PAGE)
    assert budget.usage(0) == 0
    budget.begin_admission([])
    budget.admit(group)
    assert budget.usage(2) == (3 + 2) / 8
    assert SlotBudget(8, 64).usage(2) == 0.25


def test_rows_grow_all_together_or_not_at_all():
    budget = build_budget(5)  # 4 to be had
    group = paged_group(budget, "a", 2, 10, 4 * PAGE)
    budget.begin_admission([])
    budget.admit(group)
    assert budget.grow(group.samples, [PAGE, PAGE])  # 10 + 64 tokens: a second page each
    assert not budget.grow(group.samples, [2 * PAGE, 3])
    assert [len(budget.pool.held(sample)) for sample in group.samples] == [2, 2]
    assert budget.grow(group.samples, [1, 1])


def test_nobody_gets_pages_for_more_tokens_than_it_may_have():
    budget = build_budget(5)
    group = paged_group(budget, "a", 1, 10, 40)
    budget.admit(group)
    assert budget.grow(group.samples, [1000])
    assert len(budget.pool.held(group.samples[0])) == 1


def test_a_session_keeps_the_pages_that_its_tokens_fill_and_gives_the_lookahead_back():
    budget = build_budget(9)
    group = paged_group(budget, "a", 1, PAGE + 10, 4 * PAGE)
    budget.begin_admission([])
    budget.admit(group)
    (sample,) = group.samples
    assert budget.grow([sample], [3 * PAGE])
    sample.output.token_ids += [5] * PAGE  # 10 + 64 tokens of its own
    kept = budget.keep(sample)
    assert len(budget.pool.held(kept.own)) == 2
    assert len(budget.prompts.held(kept.shared)) == 1


def test_a_group_waits_until_there_is_a_lookahead_for_all_who_run_beside_what_it_brings():
    # A page for 10 + 1 tokens, and one for the next steps, of each.
    for num_pages, num_admitted in ((4, 1), (5, 2)):
        budget = build_budget(num_pages)
        scheduler = Scheduler(8, 1000, budget)
        for name in "ab":
            scheduler.add(paged_group(budget, name, 1, 10, 4 * PAGE))
        assert len(scheduler.admit()) == num_admitted
        assert scheduler.admit() == []


def test_nothing_is_kept_for_who_cannot_become_longer():
    budget = build_budget(3)
    scheduler = Scheduler(8, 1000, budget)
    for name in "ab":
        scheduler.add(paged_group(budget, name, 1, 10, PAGE - 10))
    assert len(scheduler.admit()) == 2


class Simulation:
    """Plays an engine whose responses have lengths that nobody knows before."""

    def __init__(self, seed):
        rng = self.rng = random.Random(seed)
        self.max_prompt, self.max_response = rng.randint(1, 150), rng.randint(1, 900)
        self.steps = rng.choice([4, 16])
        max_tokens = self.max_prompt + self.max_response
        least = -(-max_tokens // PAGE) + 1
        self.budget = build_budget(
            least + rng.choice([0, 1, 5, 30]),
            num_rows=rng.randint(1, 8),
            max_tokens=max_tokens,
            lookahead=2 * self.steps,
        )
        self.scheduler = Scheduler(self.budget.num_rows, 10_000, self.budget)
        self.lengths = {}
        self.num_gave_way = 0

    def submit(self, name):
        prompt, limit = self.rng.randint(1, self.max_prompt), self.rng.randint(1, self.max_response)
        num_samples = self.rng.randint(1, self.budget.most_samples(prompt, limit))
        group = paged_group(self.budget, name, num_samples, prompt, limit)
        self.lengths |= {sample: self.rng.randint(1, limit) for sample in group.samples}
        self.scheduler.add(group)
        return group

    def step(self):
        for group in self.scheduler.admit():
            self.give_tokens(group.unfinished, 1)
        rows = self.scheduler.rows
        while not self.budget.grow(rows, [row.num_tokens + self.steps for row in rows]):
            youngest = self.scheduler.youngest
            assert len(self.scheduler.groups) > 1, "the oldest never gives way"
            self.take_out(youngest)
            self.scheduler.requeue(youngest)
            self.num_gave_way += 1
        self.check()
        self.give_tokens(list(rows), self.steps)

    def give_tokens(self, samples, number):
        for sample in samples:
            left = self.lengths[sample] - sample.num_tokens
            sample.output.token_ids += [0] * min(number, left)
            if number >= left:
                sample.output.stop_reason = "stop"
        for sample in [row for row in self.scheduler.rows if row.is_finished]:
            self.scheduler.leave(sample)
        for group in [group for group in self.scheduler.groups if not group.unfinished]:
            self.scheduler.leave_group(group)

    def take_out(self, group):
        for sample in group.unfinished:
            self.scheduler.leave(sample)
        self.scheduler.leave_group(group)

    def check(self):
        rows, waiting = self.scheduler.rows, self.scheduler.waiting
        own = [page for row in rows for page in self.budget.pool.held(row)]
        shared = [page for group in self.scheduler.groups for page in self.budget.pool.held(group)]
        assert len({*own, *shared}) == len(own) + len(shared)
        for row in rows:
            reach = min(row.num_tokens + self.steps, row.group.token_limit)
            assert len(self.budget.pages_of(row)) * PAGE >= len(row.group.prompt_ids) + reach
        arrivals = [group.arrival for group in waiting]
        assert arrivals == sorted(arrivals)
        if self.scheduler.groups and waiting:
            assert self.scheduler.youngest.arrival < arrivals[0]


def test_every_group_finishes_however_few_pages_there_are():
    num_gave_way = 0
    for seed in range(200):
        simulation = Simulation(seed)
        groups = []
        for number in range(simulation.rng.randint(1, 12)):
            groups.append(simulation.submit(str(number)))
            for _ in range(simulation.rng.randint(0, 2)):
                simulation.step()
        for _ in range(5000):
            if not simulation.scheduler.unfinished:
                break
            simulation.step()
        assert not simulation.scheduler.unfinished, f"schedule {seed} does not come to an end"
        assert simulation.budget.pool.num_free == simulation.budget.pool.capacity
        assert all(s.num_tokens == simulation.lengths[s] for g in groups for s in g.samples)
        num_gave_way += simulation.num_gave_way
    assert num_gave_way > 50


class Talks:
    """Conversations whose turns come in any order, on slots or on pages; some turn back, some are
    closed, samples of a group go on alone."""

    def __init__(self, seed):
        rng = self.rng = random.Random(seed)
        self.num_rows, num_kept = rng.randint(1, 5), rng.choice([0, 1, 4, 30])
        self.max_prompt, self.max_response = rng.randint(1, 150), rng.randint(20, 300)
        max_tokens = self.max_prompt + self.max_response
        if rng.random() < 0.5:
            self.budget = SlotPoolBudget(
                self.num_rows,
                num_kept,
                prompt_tokens=self.max_prompt,
                response_tokens=self.max_response,
            )
        else:
            num_pages = pages_for(max_tokens) + 1 + rng.choice([0, 3, 30]) + num_kept
            self.budget = build_budget(
                num_pages, num_rows=self.num_rows, max_tokens=max_tokens, num_kept=num_kept
            )
        self.sessions = SessionStore(0, self.budget.release)
        self.budget.evict = self.sessions.evict
        self.scheduler = Scheduler(self.num_rows, 10_000, self.budget)
        self.histories = {f"s{number}": [number] for number in range(8)}
        self.num_known = 0

    def submit(self):
        rng, names = self.rng, self.rng.sample(sorted(self.histories), 3)
        history = self.histories[names[0]]
        history = history[: rng.choice([len(history), rng.randint(1, len(history))])]
        history = (history + [rng.randint(0, 1) for _ in range(rng.randint(1, 40))])[
            : self.max_prompt + self.max_response - 1
        ]
        room = self.max_response - max(0, len(history) - self.max_prompt)
        limit = min(rng.choice([1, 10, 1000]), room)
        most = self.budget.most_samples(len(history), limit)
        count = min(rng.choice([1, 1, 3]), most)
        group = build_group(names[0], count, num_tokens=limit)
        group.prompt_ids = history
        for sample, name in zip(group.samples, names, strict=False):
            sample.session_id = name
        self.scheduler.add(group)

    def step(self):
        for group in self.scheduler.admit(self.sessions):
            self.num_known += len(group.known.token_ids)
            group.known = KnownTokens()
            self.check()
            self.give(group.unfinished, 1)
        rows = self.scheduler.rows
        while isinstance(self.budget, PageBudget) and not self.budget.grow(
            rows, [row.num_tokens + 4 for row in rows]
        ):
            youngest = self.scheduler.youngest
            self.take_out(youngest.unfinished, [youngest])
            self.scheduler.requeue(youngest)
        self.check()
        self.give(list(rows), 4)
        if self.rng.random() < 0.1:
            self.sessions.close(self.rng.choice(sorted(self.histories)))

    def give(self, samples, number):
        for sample in samples:
            left = sample.group.token_limit - sample.num_tokens
            sample.output.token_ids += [self.rng.randint(0, 1) for _ in range(min(number, left))]
            if number >= left or self.rng.random() < 0.1:
                sample.output.stop_reason = "stop"
                self.histories[sample.session_id] = sample.token_ids
                kept = self.budget.keep(sample)
                self.sessions.put(sample.session_id, KnownTokens(sample.token_ids[:-1], kept=kept))
        ended = [row for row in self.scheduler.rows if row.is_finished]
        self.take_out(ended, [g for g in self.scheduler.groups if not g.unfinished])

    def take_out(self, rows, groups):
        for sample in rows:
            self.scheduler.leave(sample)
        for group in groups:
            self.scheduler.leave_group(group)

    def check(self):
        """What a row or a session writes to is nobody else's."""
        budget, rows = self.budget, self.scheduler.rows
        idle = [known.kept for known in self.sessions._sessions.values()]
        own = [budget.pool.held(row) for row in rows] + [budget.pool.held(k.own) for k in idle]
        written = [page for pages in own for page in pages]
        assert len(set(written)) == len(written)
        shared = {p for g in self.scheduler.groups for p in budget.prompts.held(g)}
        shared |= {page for kept in idle for page in budget.prompts.held(kept.shared)}
        assert SCRATCH not in {*written, *shared}
        assert len({budget.slot_of(row) for row in rows}) == len(rows)
        if isinstance(budget, PageBudget):
            assert not shared & set(written)
            assert budget.pool.num_free == budget.pool.capacity - len({*written, *shared})
            assert budget.pool.num_busy <= budget.capacity
        else:
            assert budget.pool.num_free == budget.pool.capacity - len(written)
            assert budget.prompts.num_free == budget.pool.capacity - len(shared)
            for row in rows:
                most = len(row.group.prompt_ids) + row.group.token_limit - row.group.num_shared
                assert most <= self.max_response


def test_sessions_keep_nobody_out_write_to_nobody_elses_memory_and_leak_none():
    num_known = 0
    for seed in range(150):
        talks = Talks(seed)
        for _ in range(40):
            talks.submit()
            for _ in range(talks.rng.randint(0, 3)):
                talks.step()
        for _ in range(5000):
            if not talks.scheduler.unfinished:
                break
            talks.step()
        assert not talks.scheduler.unfinished, f"schedule {seed} does not come to an end"
        talks.sessions.clear()
        for pool in (talks.budget.prompts, talks.budget.pool):
            assert (pool.num_free, pool.num_busy) == (pool.capacity, 0)
        num_known += talks.num_known
    assert num_known > 10_000, "turns went on from what was kept"


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

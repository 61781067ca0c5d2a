"""Slots and the queue: a thousand random schedules, without any tensors."""

import random

from verl.workers.rollout.base import GenerationRequest, SamplingParams
from verl.workers.rollout.native.pages import SlotBudget
from verl.workers.rollout.native.scheduler import Move, Scheduler
from verl.workers.rollout.native.sequence import Group, RunningRequest, Sample


def build_scheduler(num_slots, max_prefill_tokens):
    return Scheduler(num_slots, max_prefill_tokens, SlotBudget(num_slots, slot_tokens=8))


def build_group(name, num_samples, prompt_length=3, num_tokens=4, sessions=None):
    ids = list(range(prompt_length))
    group = Group(
        owner=RunningRequest(
            request=GenerationRequest(
                request_id=name, prompt_ids=ids, params=SamplingParams(), num_samples=num_samples
            )
        ),
        prompt_ids=ids,
        num_shared=prompt_length,
        token_limit=num_tokens,
        stop_token_ids=(),
    )
    sessions = sessions or [None] * num_samples
    group.samples = [
        Sample(group=group, index=index, seed=index, session_id=session)
        for index, session in enumerate(sessions)
    ]
    return group


def test_groups_enter_in_order_and_whole():
    scheduler = build_scheduler(4, 100)
    first, second, third = (build_group(name, n) for name, n in (("a", 3), ("b", 2), ("c", 1)))
    for group in (first, second, third):
        scheduler.add(group)
    assert scheduler.admit() == [first]  # two do not fit beside three, and nobody overtakes
    assert [sample.slot for sample in first.samples] == [0, 1, 2]
    assert scheduler.admit() == []


def test_a_prefill_keeps_to_its_budget_but_lets_one_long_prompt_in():
    scheduler = build_scheduler(9, 10)
    groups = [build_group(str(n), 1, prompt_length=n) for n in (20, 6, 4, 1)]
    for group in groups:
        scheduler.add(group)
    assert scheduler.admit() == groups[:1]
    assert scheduler.admit() == groups[1:3]
    assert scheduler.admit() == groups[3:]


def test_the_last_row_takes_the_place_of_one_that_leaves():
    scheduler = build_scheduler(4, 100)
    group = build_group("a", 3)
    scheduler.add(group)
    scheduler.admit()
    assert scheduler.leave(group.samples[0]) == Move(source=2, target=0)
    assert scheduler.rows == [group.samples[2], group.samples[1]]
    assert [sample.slot for sample in group.samples] == [-1, 1, 0]
    assert scheduler.leave(group.samples[1]) is None


def test_running_groups_that_must_start_over_are_first_in_the_queue():
    scheduler = build_scheduler(2, 100)
    groups = [build_group(str(n), 1) for n in range(3)]
    for group in groups:
        scheduler.add(group)
    scheduler.admit()
    scheduler.requeue_running()
    assert list(scheduler.waiting) == groups
    assert not scheduler.rows
    assert all(sample.slot == -1 for group in groups for sample in group.samples)


def test_a_turn_waits_before_conversations_that_began_later_until_its_own_is_closed():
    scheduler = build_scheduler(2, 100)
    both, new = build_group("both", 2, sessions=["a", "b"]), build_group("new", 1, sessions=["c"])
    plain = build_group("plain", 1)
    for group in (both, new, plain):
        scheduler.add(group)
    assert scheduler.admit() == [both]
    turns = [build_group(f"{name} again", 1, sessions=[name]) for name in "cab"]
    for turn in turns:
        scheduler.add(turn)
    of_c, *of_both = turns
    assert list(scheduler.waiting) == [*of_both, new, of_c, plain]
    assert scheduler.admit() == []  # nobody overtakes them, and nobody leaves for them
    for name in ("a", "unknown"):
        scheduler.close_session(name)
    late = build_group("late", 1, sessions=["a"])
    scheduler.add(late)
    assert scheduler.waiting[-1] is late


def test_conversations_that_nobody_closes_are_forgotten_at_last(monkeypatch):
    monkeypatch.setattr("verl.workers.rollout.native.scheduler.MOST_CONVERSATIONS", 2)
    scheduler = build_scheduler(1, 100)
    for name in "abcab":  # the third makes it forget the first, and that one the second
        scheduler.add(build_group(name, 1, sessions=[name]))
    assert [group.request.request_id for group in scheduler.waiting] == list("abcab")
    scheduler.add(build_group("again", 1, sessions=["a"]))
    assert [group.request.request_id for group in scheduler.waiting] == [*"abca", "again", "b"]


class Simulation:
    """Plays an engine: slots hold the name of who owns them, and moves copy it."""

    def __init__(self, rng):
        self.rng = rng
        self.scheduler = build_scheduler(rng.randint(1, 6), rng.randint(1, 12))
        self.prompt_slots, self.slots = {}, {}
        self.finished = []

    def submit(self, name):
        rng = self.rng
        num_samples = rng.randint(1, self.scheduler.num_slots)
        group = build_group(name, num_samples, rng.randint(1, 8), rng.randint(1, 5))
        self.scheduler.add(group)
        return group

    def step(self):
        for group in self.scheduler.admit():
            self.prompt_slots[group.slot] = group
            for sample in group.unfinished:
                self.slots[sample.slot] = sample
        for sample in self.scheduler.rows:
            sample.output.token_ids.append(0)
            if sample.num_tokens >= sample.group.token_limit or self.rng.random() < 0.2:
                sample.output.stop_reason = "stop"
        self.release()

    def abort(self, group):
        for sample in group.unfinished:
            sample.output.stop_reason = "abort"
            if sample.slot == -1:
                self.finished.append(sample)
        self.scheduler.withdraw(group)
        self.release()

    def release(self):
        scheduler = self.scheduler
        for sample in [row for row in scheduler.rows if row.is_finished]:
            self.finished.append(sample)
            self.apply(scheduler.leave(sample), self.slots)
        for group in [group for group in scheduler.groups if not group.unfinished]:
            self.apply(scheduler.leave_group(group), self.prompt_slots)

    def apply(self, move, store):
        if move is not None:
            store[move.target] = store[move.source]

    def check(self):
        scheduler = self.scheduler
        assert len(scheduler.rows) <= scheduler.num_slots
        for slot, sample in enumerate(scheduler.rows):
            assert sample.slot == slot
            assert self.slots[slot] is sample
            assert scheduler.groups[sample.group.slot] is sample.group
        for slot, group in enumerate(scheduler.groups):
            assert group.slot == slot
            assert self.prompt_slots[slot] is group


def test_a_thousand_random_schedules_lose_no_request_and_leave_no_slot_behind():
    for seed in range(1000):
        simulation = Simulation(random.Random(seed))
        groups = []
        for number in range(simulation.rng.randint(1, 12)):
            groups.append(simulation.submit(str(number)))
            for _ in range(simulation.rng.randint(0, 3)):
                simulation.step()
                simulation.check()
            if simulation.rng.random() < 0.2:
                simulation.abort(simulation.rng.choice(groups))
                simulation.check()
            if simulation.rng.random() < 0.1:
                simulation.scheduler.requeue_running()
        for _ in range(1000):
            if not simulation.scheduler.unfinished:
                break
            simulation.step()
            simulation.check()
        assert not simulation.scheduler.unfinished, f"schedule {seed} does not come to an end"
        assert all(not group.unfinished and group.slot == -1 for group in groups)
        everyone = [id(sample) for group in groups for sample in group.samples]
        assert sorted(everyone) == sorted(map(id, simulation.finished)), f"schedule {seed}"

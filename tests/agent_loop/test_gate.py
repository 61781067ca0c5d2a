"""Which weights sample which token follows from the plan, whatever the machine does meanwhile."""

import asyncio
import math
import random
import threading
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.agent_loop.gate import Gate
from verl.agent_loop.schedule import Schedule
from verl.config.async_plan import AsyncPlan
from verl.utils.scramble import keyed_seed
from verl.workers.rollout.base import TokenOutput

STEPS, SAMPLES, LONGEST = 6, 2, 40


def length_of(index, sample, turn):
    """A heavy tail: most turns are short."""
    draw = keyed_seed(7, index, sample, turn) % 100
    return 1 + (draw % 6 if draw < 80 else LONGEST - 2 - draw % 10)


@dataclass
class World:
    """An engine and a trainer whose speeds are random; tokens follow from row, place, version."""

    plan: AsyncPlan
    speed_seed: int
    turns: int = 1
    num_steps: int = STEPS
    version: int = 0
    rows: dict = field(default_factory=dict)
    aborts: list = field(default_factory=list)
    num_asked: int = 0
    tasks: list = field(default_factory=list)

    def __post_init__(self):
        self.random = random.Random(self.speed_seed)
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.gate = Gate(self.plan, self.plan.batch * self.num_steps, self.loop, self.abort)
        self.ended = {}
        self.num_started = 0

    def abort(self):
        for event in self.aborts:
            event.set()

    async def pause(self):
        for _ in range(self.random.choice((0, 0, 0, 1, 3, 9))):
            await asyncio.sleep(0)

    async def ask(self, row, turn, sampled, room):
        """An engine: one token after the other, slowly, until it is aborted."""
        self.num_asked += 1
        is_aborted = asyncio.Event()
        self.aborts.append(is_aborted)
        output = TokenOutput()
        for place in range(len(sampled), len(sampled) + room):
            await self.pause()
            if is_aborted.is_set():
                output.stop_reason = "abort"
                break
            token = keyed_seed(*row.key, turn, place, self.version) % 1000
            output.token_ids.append(token)
            output.log_probs.append(token / 1000)
            output.policy_versions.append(self.version)
            if place + 1 >= length_of(*row.key, turn):
                output.stop_reason = "stop"
                break
        self.aborts.remove(is_aborted)
        output.stop_reason = output.stop_reason or "length"
        return output

    async def run_row(self, row):
        outputs = []
        for turn in range(self.turns):
            outputs.append(
                await self.gate.turn(
                    row, lambda sampled, room, turn=turn: self.ask(row, turn, sampled, room), 100
                )
            )
            for _ in range(self.random.choice((0, 5, 50))):  # a tool
                await asyncio.sleep(0)
        self.gate.end(row)
        self.rows[row.key] = outputs
        self.ended[row.key].set()

    async def start(self, indices):
        for index in indices:
            for sample in range(SAMPLES):
                self.ended[index, sample] = asyncio.Event()
                task = asyncio.create_task(self.run_row(self.gate.begin(index, sample)))
                self.tasks.append(task)

    def admit(self):
        limit = self.gate.schedule.limit
        indices = range(self.num_started, limit)
        asyncio.run_coroutine_threadsafe(self.start(indices), self.loop).result(60)
        self.num_started = limit

    async def taken(self, step):
        batch = self.plan.batch
        for index in range(step * batch, (step + 1) * batch):
            for sample in range(SAMPLES):
                await self.ended[index, sample].wait()

    def train(self, until=None, first=0):
        """The loop of the trainer; the rows of every step as it found them."""
        found = []
        for step in range(first, until or self.num_steps):
            self.admit()
            asyncio.run_coroutine_threadsafe(self.taken(step), self.loop).result(60)
            batch = range(step * self.plan.batch, (step + 1) * self.plan.batch)
            found.append(
                [
                    [(out.token_ids, out.log_probs, out.policy_versions, out.stop_reason)
                     for out in self.rows[index, sample]]
                    for index in batch
                    for sample in range(SAMPLES)
                ]
            )  # fmt: skip
            if self.plan.lag == 0:
                self.gate.settle()
                self.state = self.gate.state_dict()
            if step + 1 == self.gate.schedule.next_update:
                if self.plan.lag:
                    self.gate.settle()
                    self.state = self.gate.state_dict()
                self.version = step + 1
                self.gate.publish()
                self.admit()
        return found


PLANS = {
    "on_policy": AsyncPlan(batch=3),
    "one_step_off": AsyncPlan(batch=3, staleness=1.0, lag=1, is_partial=False),
    "colocated": AsyncPlan(batch=3, staleness=1.0, reply_tokens=8),
    "colocated_3": AsyncPlan(batch=2, staleness=3.0, reply_tokens=2),
    "separate": AsyncPlan(batch=3, staleness=2.0, lag=1, reply_tokens=8),
    "smooth": AsyncPlan(batch=3, staleness=2.0, lag=1, reply_tokens=8, update_tokens=9),
    "half": AsyncPlan(batch=4, staleness=0.5, lag=1, reply_tokens=8),
    "stream": AsyncPlan(batch=2, sync_every=3, lag=1),
    "fully": AsyncPlan(batch=2, sync_every=2, staleness=1.0, lag=1, reply_tokens=3),
    "drained": AsyncPlan(batch=2, sync_every=2, staleness=1.0, lag=1, is_partial=False),
}


@pytest.mark.parametrize("turns", [1, 3])
@pytest.mark.parametrize("name", PLANS)
def test_tokens_and_versions_do_not_depend_on_the_speed_of_anything(name, turns):
    plan = PLANS[name]
    runs = [World(plan, speed, turns).train() for speed in range(4)]
    assert all(run == runs[0] for run in runs[1:])
    versions = [[v for row in step for out in row for v in out[2]] for step in runs[0]]
    for step, seen in enumerate(versions):
        assert step - min(seen) <= plan.max_staleness
        assert max(seen) <= step
    if name in ("colocated", "colocated_3", "separate"):
        spans = {len({v for out in row for v in out[2]}) for step in runs[0] for row in step}
        assert max(spans) > 1, "some row went on across an update"
    if not plan.is_partial and turns == 1:
        assert all(len(set(out[2])) == 1 for step in runs[0] for row in step for out in row)


@pytest.mark.parametrize("name", ["colocated_3", "separate", "smooth", "fully", "half"])
def test_a_run_continues_from_what_its_rows_had_sampled(name):
    plan = PLANS[name]
    whole = World(plan, 1, turns=2).train()
    for stop in range(plan.sync_every, STEPS - 1, plan.sync_every):
        before = World(plan, 2, turns=2)
        assert before.train(until=stop) == whole[:stop]
        after = World(plan, 3, turns=2, version=stop)
        after.gate.load_state_dict(before.state)
        after.num_started = stop * plan.batch
        assert after.train(first=stop) == whole[stop:]


def test_rows_that_ran_ahead_are_cut_back_and_counted():
    worlds = [World(PLANS["colocated_3"], speed) for speed in range(6)]
    for world in worlds:
        world.train()
    assert sum(world.gate.num_cut for world in worlds) > 0


def test_a_group_cannot_start_before_its_time():
    schedule = Schedule(PLANS["colocated"], 30)
    assert schedule.limit == 6
    schedule.begin(5)
    with pytest.raises(ValueError, match="group 6 starts before its time; the limit is 6"):
        schedule.begin(6)


def test_an_error_of_generation_ends_the_wait_for_rows():
    world = World(PLANS["colocated"], 0)
    asyncio.run_coroutine_threadsafe(world.start([]), world.loop).result(30)

    async def begin():
        for index in range(6):
            world.gate.begin(index, 0)

    asyncio.run_coroutine_threadsafe(begin(), world.loop).result(30)
    world.gate.fail(RuntimeError("the engine is gone"))
    with pytest.raises(RuntimeError, match="the engine is gone"):
        world.gate.settle()


# ---- what is trained on --------------------------------------------------------------------------


def virtual_run(plan, lengths, num_steps):
    """The schedule alone: (step, versions, start, end) of every row, in the order of the data."""
    schedule = Schedule(plan, num_steps * plan.batch)
    rows, clocks, num_started = [], [0], 0
    while schedule.published < num_steps:
        for index in range(num_started, schedule.limit):
            row = schedule.begin(index)
            rows.append((index // plan.batch, row.clock, row.clock + lengths[index]))
            schedule.advance(row, lengths[index])
            schedule.end(row)
        num_started = schedule.limit
        clocks.append(schedule.update_clock())
        schedule.publish(clocks[-1])
    found = []
    for step, start, end in rows:
        first = max(number for number, clock in enumerate(clocks) if clock <= start)
        last = max(number for number, clock in enumerate(clocks) if clock < end)
        found.append((step, [n * plan.sync_every for n in (first, last)], start, end))
    return found


@settings(max_examples=150, deadline=None)
@given(
    batch=st.integers(1, 6),
    sync_every=st.integers(1, 3),
    staleness=st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0, 3.5]),
    lag=st.integers(0, 1),
    update_tokens=st.integers(0, 30),
    seed=st.integers(0, 2**32),
)
def test_every_group_is_trained_once_and_no_token_is_older_than_the_bound(
    batch, sync_every, staleness, lag, update_tokens, seed
):
    plan = AsyncPlan(
        batch=batch, sync_every=sync_every, staleness=staleness, lag=lag,
        update_tokens=update_tokens * lag,
    )  # fmt: skip
    num_steps, draw = 4 * sync_every, random.Random(seed)
    lengths = [1 + int(draw.lognormvariate(2, 1)) for _ in range(num_steps * batch)]
    rows = virtual_run(plan, lengths, num_steps)
    assert [step for step, *_ in rows] == [index // batch for index in range(len(lengths))]
    for step, (first, last), *_ in rows:
        assert step - plan.max_staleness <= first <= last <= step


def ks_p_value(left, right):
    """Kolmogorov and Smirnov's two-sample test: how likely so large a distance is by chance."""
    values = sorted({*left, *right})
    share = [
        [sum(x <= v for x in sample) / len(sample) for v in values] for sample in (left, right)
    ]
    distance = max(abs(a - b) for a, b in zip(*share, strict=True))
    root = math.sqrt(len(left) * len(right) / (len(left) + len(right)))
    scaled = (root + 0.12 + 0.11 / root) * distance
    terms = ((-1) ** (k - 1) * math.exp(-2 * (k * scaled) ** 2) for k in range(1, 101))
    return min(1.0, 2 * sum(terms)) if scaled > 0.2 else 1.0


@pytest.mark.parametrize("staleness", [0.0, 1.0, 4.0])
def test_lengths_that_are_trained_are_those_that_are_generated(staleness):
    """The 99th percentile is ten medians; whoever trains on what ends first sees short ones."""
    plan, num_steps = AsyncPlan(batch=16, staleness=staleness), 20
    draw, spread = random.Random(5), math.log(10) / 2.326
    drawn = [round(draw.lognormvariate(math.log(300), spread)) for _ in range(2000)]
    rows = virtual_run(plan, drawn, num_steps)
    others = drawn[len(rows) :]
    for steps in (range(10), range(10, 20)):  # the early ones, and the late ones
        trained = [end - start for step, _, start, end in rows if step in steps]
        assert len(trained) == 160, "no group is dropped"
        assert ks_p_value(trained, others) > 0.05
    ahead = rows[: round(16 * (1 + staleness))]
    by_arrival = sorted(ahead, key=lambda row: row[3])[:16]
    if staleness == 4.0:
        assert ks_p_value([end - start for *_, start, end in by_arrival], others) < 0.01

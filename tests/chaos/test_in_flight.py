"""Runs that die with groups in flight: each prompt is consumed exactly once in the end.

A schedule is drawn from a seed: in which order groups end, which fail, and when the run dies. The
buffer and its policies are the real ones; the engine ends groups in any order, and the "disk" holds
what a checkpoint would. What the steps of the surviving history took must be what an undisturbed
run takes, and account for every prompt that was drawn.
"""

import random

import pytest

from verl.agent_loop.buffer import Buffer, DynamicSampling, OnPolicy
from verl.protocol.trajectory import Group, Score, Trajectory

NUM_ROWS, NUM_STEPS, PROMPTS_PER_STEP = 7, 6, 4
POLICIES = {
    "on-policy": lambda: OnPolicy(PROMPTS_PER_STEP),
    "dynamic sampling": lambda: DynamicSampling(PROMPTS_PER_STEP, 3, "score", 0),
}


class Died(Exception):
    pass


class Run:
    """One life of a run, from a checkpoint to its death or its end."""

    def __init__(self, policy, task, checkpoint, rng=None):
        self.buffer = Buffer(policy)
        self.task = task
        self.rng = rng
        self.cursor, self.ledger = checkpoint["cursor"], list(checkpoint["ledger"])
        if "buffer" in checkpoint:
            self.buffer.load_state_dict(checkpoint["buffer"])
        self.saved = checkpoint

    def may_die(self):
        if self.rng is not None and self.rng.random() < 0.03:
            raise Died

    def train(self):
        for step in range(len(self.ledger) + 1, NUM_STEPS + 1):
            for count in self.buffer.demands(step):
                self.generate(count, step)
            self.may_die()
            taken = self.buffer.take(step)
            entry = ([g.uid for g in taken.groups], [g.uid for g in taken.discarded])
            self.may_die()
            self.ledger.append(entry)
            self.buffer.publish(step)
            if self.rng is None or self.rng.random() < 0.5:
                self.saved = {
                    "cursor": self.cursor,
                    "ledger": list(self.ledger),
                    "buffer": self.buffer.state_dict(),
                }
            self.may_die()
        return self.ledger

    def generate(self, count, step):
        """Draw prompts; their groups end in any order, and the run may die in between."""
        indices = self.buffer.begin(count, step=step)
        groups = [self.group(index, self.cursor + n, step) for n, index in enumerate(indices)]
        self.cursor += count
        if self.rng is not None:
            self.rng.shuffle(groups)
        for group in groups:
            self.may_die()
            self.buffer.put(group)

    def group(self, index, position, step):
        """What the seed says of the prompt at that position of the data, whenever it is run."""
        values = random.Random(f"{self.task}-{position}").choices((0.0, 1.0), k=3)
        uid = f"{position}:{position % NUM_ROWS}"
        trajectories = [
            Trajectory(uid=uid, sample=n, row={}, grade=Score(v)) for n, v in enumerate(values)
        ]
        return Group(index=index, uid=uid, drawn_at=step, trajectories=trajectories)


def violations(ledger, undisturbed, num_drawn):
    """What is wrong with a history."""
    used = [uid for taken, discarded in ledger for uid in (*taken, *discarded)]
    positions = sorted(int(uid.partition(":")[0]) for uid in used)
    found = []
    if len(set(positions)) < len(positions):
        found.append("a prompt was consumed twice")
    if set(range(num_drawn)) - set(positions):
        found.append("a prompt was skipped")
    if ledger != undisturbed:
        found.append("another history than without deaths")
    return found


def history(policy, seed):
    """The ledger of a run that dies again and again, and how often it died."""
    rng = random.Random(seed)
    checkpoint, num_deaths = {"cursor": 0, "ledger": []}, 0
    while True:
        run = Run(POLICIES[policy](), seed, checkpoint, rng)
        try:
            return run.train(), run.cursor, num_deaths
        except Died:
            checkpoint, num_deaths = run.saved, num_deaths + 1


def deaths_of(policy, seed):
    undisturbed = Run(POLICIES[policy](), seed, {"cursor": 0, "ledger": []}).train()
    ledger, num_drawn, num_deaths = history(policy, seed)
    assert violations(ledger, undisturbed, num_drawn) == [], f"{policy}, seed {seed}"
    return num_deaths


@pytest.mark.parametrize("policy", POLICIES)
def test_each_prompt_is_consumed_exactly_once(policy):
    assert sum(deaths_of(policy, seed) for seed in range(200)) > 200


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("policy", POLICIES)
def test_ten_thousand_schedules_consume_each_prompt_once(policy):
    assert sum(deaths_of(policy, seed) for seed in range(10_000)) > 10_000


def test_the_checker_sees_each_kind_of_fault():
    whole = [(["0:0", "1:1"], []), (["2:2"], ["3:3"])]
    assert violations(whole, whole, 4) == []
    assert "a prompt was consumed twice" in violations([*whole, (["1:1"], [])], whole, 4)
    assert "a prompt was skipped" in violations(whole[:1], whole, 4)
    swapped = [(["1:1", "0:0"], []), whole[1]]
    assert violations(swapped, whole, 4) == ["another history than without deaths"]


def test_a_checkpoint_with_groups_in_flight_is_refused():
    """They would be counted as drawn and never be trained."""
    buffer = Buffer(OnPolicy(2))
    buffer.begin(2, step=1)
    with pytest.raises(AssertionError, match="2 groups are still generated"):
        buffer.state_dict()

"""Random faults on the way; nothing that was not sent may ever be served."""

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from tests.workers.weight_sync.models import Weights, are_equal, receiver_for, small_weights
from verl.workers.weight_sync import WeightReceiver, WeightSender, WeightSyncError
from verl.workers.weight_sync.bucket import Bucket


@dataclass
class Wire:
    """One bucket as bytes."""

    header: bytes
    payload: bytes

    @classmethod
    def of(cls, bucket: Bucket) -> "Wire":
        return cls(bucket.header(), bucket.payload.numpy().tobytes())

    def bucket(self) -> Bucket:
        payload = torch.frombuffer(bytearray(self.payload) or bytearray(1), dtype=torch.uint8)
        return Bucket.from_wire(self.header, payload[: len(self.payload)])


Update = list[Wire]
Fault = Callable[[random.Random, Update, Update], Update]


def drop(rng: random.Random, update: Update, _: Update) -> Update:
    place = rng.randrange(len(update))
    return update[:place] + update[place + 1 :]


def flip(rng: random.Random, update: Update, _: Update) -> Update:
    place = rng.randrange(len(update))
    wire = update[place]
    content = bytearray(wire.header + wire.payload)
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    size = len(wire.header)
    damaged = Wire(bytes(content[:size]), bytes(content[size:]))
    return update[:place] + [damaged] + update[place + 1 :]


def repeat(rng: random.Random, update: Update, _: Update) -> Update:
    place = rng.randrange(len(update))
    later = rng.randrange(place + 1, len(update) + 1)
    return update[:later] + [update[place]] + update[later:]


def deliver_old(rng: random.Random, update: Update, old: Update) -> Update:
    place = rng.randrange(len(update) + 1)
    return update[:place] + [rng.choice(old)] + update[place:]


def replace_by_old(rng: random.Random, update: Update, old: Update) -> Update:
    place = rng.randrange(len(update))
    return update[:place] + [old[place]] + update[place + 1 :]


def swap(rng: random.Random, update: Update, _: Update) -> Update:
    first, second = sorted(rng.sample(range(len(update)), 2))
    shuffled = list(update)
    shuffled[first], shuffled[second] = shuffled[second], shuffled[first]
    return shuffled


def truncate(rng: random.Random, update: Update, _: Update) -> Update:
    place = rng.randrange(len(update))
    wire = update[place]
    cut = Wire(wire.header, wire.payload[: rng.randrange(len(wire.payload))])
    return update[:place] + [cut] + update[place + 1 :]


def deliver(receiver: WeightReceiver, update: Update) -> int:
    """How many buckets were refused."""
    num_refused = 0
    for wire in update:
        try:
            receiver.apply(wire.bucket())
        except WeightSyncError:
            num_refused += 1
    return num_refused


def sent(sender: WeightSender, weights: Weights, version: int) -> Update:
    return [Wire.of(bucket) for bucket in sender.buckets(weights.items(), version)]


@pytest.mark.parametrize(
    ("fault", "can_complete"),
    [
        (drop, False),
        (flip, False),
        (truncate, False),
        (swap, False),
        (replace_by_old, False),
        (repeat, True),
        (deliver_old, True),
    ],
)
@pytest.mark.parametrize("num_runs", [60, pytest.param(400, marks=pytest.mark.slow)])
def test_every_fault_is_refused_and_only_a_complete_update_is_served(
    fault: Fault, can_complete, num_runs
):
    rng = random.Random(17)
    before, after = small_weights(seed=1), small_weights(seed=2)
    sender = WeightSender(40)
    old, update = sent(sender, before, 1), sent(sender, after, 2)
    for _ in range(num_runs):
        targets, receiver = receiver_for(before)
        assert deliver(receiver, old) == 0
        num_refused = deliver(receiver, fault(rng, update, old))
        is_update_held = receiver.held is not None and receiver.held.version == 2
        assert is_update_held == can_complete
        if fault is not drop:  # without the last bucket nothing is left to refuse
            assert num_refused >= 1
        if receiver.held is not None:
            assert are_equal(targets, after if is_update_held else before)


def test_after_any_fault_the_next_attempt_succeeds():
    rng = random.Random(23)
    before, after = small_weights(seed=1), small_weights(seed=2)
    sender = WeightSender(40)
    old, update = sent(sender, before, 1), sent(sender, after, 2)
    again = sent(sender, after, 2)
    for fault in (drop, flip, swap, truncate, replace_by_old) * 20:
        targets, receiver = receiver_for(before)
        deliver(receiver, old)
        deliver(receiver, fault(rng, update, old))
        assert deliver(receiver, again) == 0
        assert receiver.version == 2
        assert are_equal(targets, after)

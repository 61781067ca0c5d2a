"""Whole tensors are handed on as they come; what is not as sent ends the update, told to both."""

import random

import pytest
import torch

from tests.workers.weight_sync.models import small_weights
from tests.workers.weight_sync.test_faults import (
    Wire,
    deliver_old,
    drop,
    flip,
    repeat,
    replace_by_old,
    swap,
    truncate,
)
from verl.workers.weight_sync import Published, WeightSender, WeightSyncError
from verl.workers.weight_sync.bucket import (
    Bucket,
    ChannelError,
    DamagedBucketError,
    FingerprintError,
    WrongWeightsError,
)
from verl.workers.weight_sync.channel import ReceivingChannel, published_by
from verl.workers.weight_sync.streaming import stream_weights

NUM_RUNS = 300
FAULTS = [
    *(drop, flip, repeat, deliver_old, replace_by_old, swap, truncate),
    lambda rng, update, old: update,
]


class Recorded(ReceivingChannel):
    """Buckets from a list, each in the same memory as a real channel's; then the line is closed."""

    def __init__(self, wires):
        self.wires = list(wires)
        self.memory = torch.zeros(max(len(wire.payload) for wire in wires), dtype=torch.uint8)
        self.num_received = 0
        self.confirmed = "nothing"

    def receive(self) -> Bucket:
        if self.num_received == len(self.wires):
            raise ChannelError("the sender closed the line")
        wire = self.wires[self.num_received]
        self.num_received += 1
        bucket = wire.bucket()
        self.memory[: len(wire.payload)].copy_(bucket.payload)
        return Bucket.from_wire(wire.header, self.memory[: len(wire.payload)])

    def confirm(self, held: Published | None) -> None:
        self.confirmed = held


def wires_of(weights, bucket_bytes, version=1, sender=None):
    sender = sender or WeightSender(bucket_bytes)
    return [Wire.of(bucket) for bucket in sender.buckets(weights.items(), version)]


def taken_by(channel):
    """What an engine would hold after this update."""
    held = {}
    published = stream_weights(channel, held.update)
    return held, published


@pytest.mark.parametrize("bucket_bytes", [1, 3, 7, 64, 96, 155, 1000])
def test_tensors_arrive_as_they_were_sent_however_they_are_cut(bucket_bytes):
    weights = small_weights()
    channel = Recorded(wires_of(weights, bucket_bytes))
    held, published = taken_by(channel)
    assert list(held) == list(weights)
    for name, tensor in weights.items():
        assert held[name].dtype == tensor.dtype
        assert torch.equal(held[name], tensor)
    last = channel.wires[-1].bucket()
    assert channel.confirmed == published == published_by(last)


def test_a_tensor_is_handed_on_before_the_next_bucket_is_read():
    weights = {str(n): torch.full((16,), float(n)) for n in range(6)}  # 64 bytes each
    channel = Recorded(wires_of(weights, 128))  # two tensors to a bucket
    seen = []

    def load(stream):
        for name, tensor in stream:
            seen.append((name, channel.num_received))
            assert tensor[0] == float(name)

    stream_weights(channel, load)
    assert [count for _, count in seen] == [1, 1, 2, 2, 3, 3]


def test_no_faulty_update_is_ever_taken_for_whole():
    sender = WeightSender(48)
    old = wires_of(small_weights(0), 48, version=1, sender=sender)
    new, expected = small_weights(1), None
    outcomes = {"whole": 0, "refused": 0}
    for run in range(NUM_RUNS):
        rng = random.Random(run)
        update = wires_of(new, 48, version=2, sender=sender)
        fault = rng.choice(FAULTS)
        channel = Recorded(fault(rng, update, old))
        try:
            held, published = taken_by(channel)
        except WeightSyncError:
            assert channel.confirmed in (None, "nothing")
            outcomes["refused"] += 1
            continue
        expected = expected or published
        assert channel.confirmed == published == expected
        assert all(torch.equal(held[name], new[name]) for name in new)
        outcomes["whole"] += 1
    assert outcomes["whole"] > 25
    assert outcomes["refused"] > 150


def test_a_refused_update_is_read_to_its_end_so_that_others_get_theirs():
    wires = wires_of(small_weights(), 32)
    channel = Recorded([wires[0], *wires[2:]])
    with pytest.raises(WeightSyncError, match="before bucket 1"):
        taken_by(channel)
    assert channel.num_received == len(channel.wires)
    assert channel.confirmed is None


def test_nothing_of_a_damaged_bucket_is_handed_on():
    weights = {str(n): torch.full((16,), float(n)) for n in range(6)}
    wires = wires_of(weights, 128)  # two tensors to a bucket
    wires[1].payload = bytes([wires[1].payload[0] ^ 1]) + wires[1].payload[1:]
    taken = []
    channel = Recorded(wires)
    with pytest.raises(DamagedBucketError, match="bucket 1"):
        stream_weights(channel, lambda stream: taken.extend(name for name, _ in stream))
    assert taken == ["0", "1"]
    assert channel.confirmed is None


def test_an_engine_that_stops_early_has_no_version():
    channel = Recorded(wires_of(small_weights(), 32))
    with pytest.raises(WrongWeightsError, match="after 1 tensors"):
        stream_weights(channel, lambda stream: print(next(iter(stream))[0]))
    assert channel.confirmed is None


def test_an_engine_that_fails_is_told_to_the_sender():
    def load(stream):
        raise KeyError("no such layer")

    channel = Recorded(wires_of(small_weights(), 32))
    with pytest.raises(KeyError, match="no such layer"):
        stream_weights(channel, load)
    assert channel.confirmed is None
    assert channel.num_received == len(channel.wires)


def test_a_tensor_that_comes_twice_or_not_at_all_is_refused():
    weights = small_weights()
    bucket = Wire.of(next(WeightSender(1000).buckets(weights.items(), 1))).bucket()
    kind = bucket.pieces[0].kind
    absent = Bucket(**{**vars(bucket), "pieces": bucket.pieces[1:]}).sealed()
    with pytest.raises(WrongWeightsError, match=r"embed\.weight did not come as announced"):
        taken_by(Recorded([Wire.of(absent)]))
    doubled = Bucket(**{**vars(bucket), "pieces": (*bucket.pieces, bucket.pieces[0])}).sealed()
    with pytest.raises(WrongWeightsError, match=r"embed\.weight a second time"):
        taken_by(Recorded([Wire.of(doubled)]))
    wrong = {**bucket.manifest, kind: bucket.manifest[kind] ^ 1}
    with pytest.raises(FingerprintError, match=r"embed\.weight are not what was sent"):
        taken_by(Recorded([Wire.of(Bucket(**{**vars(bucket), "manifest": wrong}).sealed())]))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"tensor_start": 4}, "next is byte 0"),
        ({"payload_start": 140}, "next is byte 0 of 96"),
        ({"num_bytes": 97}, "next is byte 0 of 96"),
        ({"num_bytes": 95}, "next is byte 95 of 96"),
    ],
)
def test_pieces_that_do_not_fit_are_refused(change, complaint):
    bucket = Wire.of(next(WeightSender(1000).buckets(small_weights().items(), 1))).bucket()
    pieces = (bucket.pieces[0]._replace(**change), *bucket.pieces[1:])
    wire = Wire.of(Bucket(**{**vars(bucket), "pieces": pieces}).sealed())
    with pytest.raises(WrongWeightsError, match=complaint):
        taken_by(Recorded([wire]))


def test_a_number_format_that_torch_does_not_have_is_refused():
    bucket = Wire.of(next(WeightSender(1000).buckets(small_weights().items(), 1))).bucket()
    piece = bucket.pieces[0]
    odd = piece._replace(kind=piece.kind._replace(dtype="manual_seed"))
    wire = Wire.of(Bucket(**{**vars(bucket), "pieces": (odd, *bucket.pieces[1:])}).sealed())
    with pytest.raises(WrongWeightsError, match="'manual_seed', which torch does not know"):
        taken_by(Recorded([wire]))

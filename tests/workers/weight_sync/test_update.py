from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workers.weight_sync.models import are_equal, receiver_for, small_weights
from verl.workers.weight_sync import (
    Published,
    WeightReceiver,
    WeightSender,
    WeightsNotReadyError,
    copy_weights,
)
from verl.workers.weight_sync.bucket import (
    Bucket,
    DamagedBucketError,
    FingerprintError,
    LostBucketError,
    RepeatedBucketError,
    StaleBucketError,
    WrongWeightsError,
)


def buckets_of(weights, version=1, bucket_bytes=32, sender=None) -> list[Bucket]:
    """All buckets of an update at once, each with memory of its own."""
    sender = sender or WeightSender(bucket_bytes)
    return [
        replace(bucket, payload=bucket.payload.clone())
        for bucket in sender.buckets(weights.items(), version)
    ]


@given(bucket_bytes=st.integers(1, 200))
@settings(max_examples=60, deadline=None)
def test_weights_arrive_whole_whatever_the_size_of_a_bucket(bucket_bytes):
    weights = small_weights()
    targets, receiver = receiver_for(weights)
    published = copy_weights(WeightSender(bucket_bytes), weights.items(), 3, receiver)
    assert are_equal(weights, targets)
    assert receiver.held == published
    assert receiver.version == published.version == 3


def test_a_bucket_never_exceeds_its_size_and_a_small_model_is_one_bucket():
    weights = small_weights()
    sizes = [len(bucket.payload) for bucket in buckets_of(weights, bucket_bytes=32)]
    assert sizes == [32, 32, 32, 32, 27]
    (only,) = buckets_of(weights, bucket_bytes=2**31)
    assert only.is_last
    assert only.payload.untyped_storage().nbytes() < 512


def test_addresses_stay_and_torch_counts_the_writes():
    weights = small_weights()
    targets, receiver = receiver_for(weights)
    addresses = [target.data_ptr() for target in targets.values()]
    writes = targets["embed.weight"]._version
    copy_weights(WeightSender(), weights.items(), 1, receiver)
    assert [target.data_ptr() for target in targets.values()] == addresses
    assert targets["embed.weight"]._version > writes  # caches of the old weights are dropped by it


def test_both_sides_give_the_same_content_the_same_fingerprint():
    weights = small_weights()
    prints = {
        copy_weights(WeightSender(size), weights.items(), 1, receiver_for(weights)[1]).fingerprint
        for size in (7, 64, 1000)
    }
    reversed_order = dict(reversed(weights.items()))
    prints.add(
        copy_weights(
            WeightSender(), reversed_order.items(), 1, receiver_for(weights)[1]
        ).fingerprint
    )
    assert len(prints) == 1
    other = copy_weights(
        WeightSender(), small_weights(seed=1).items(), 1, receiver_for(weights)[1]
    ).fingerprint
    assert other not in prints


def test_nothing_is_served_before_the_first_update_or_in_the_middle_of_one():
    weights = small_weights()
    _, receiver = receiver_for(weights)
    with pytest.raises(WeightsNotReadyError, match="no update has begun"):
        receiver.require_ready()
    sender = WeightSender(32)
    for bucket in sender.buckets(weights.items(), 1):
        receiver.apply(bucket)
    assert receiver.version == 1
    for bucket in sender.buckets(weights.items(), 2):
        receiver.apply(bucket)
        if not bucket.is_last:
            with pytest.raises(WeightsNotReadyError, match=r"version 2 \(attempt 2\) is waiting"):
                _ = receiver.version
    assert receiver.version == 2


def test_a_reader_may_insist_on_what_was_published():
    weights = small_weights()
    _, receiver = receiver_for(weights)
    published = copy_weights(WeightSender(), weights.items(), 1, receiver)
    assert receiver.require_ready(published) == published
    with pytest.raises(WeightsNotReadyError, match=r"version 1 .* is here, asked for is version 2"):
        receiver.require_ready(Published(2, published.fingerprint))


def test_a_lost_bucket_is_named_and_may_still_come():
    weights = small_weights()
    targets, receiver = receiver_for(weights)
    buckets = buckets_of(weights)
    receiver.apply(buckets[0])
    with pytest.raises(LostBucketError, match=r"bucket 2 of version 1 .* came before bucket 1"):
        receiver.apply(buckets[2])
    assert [receiver.apply(bucket) for bucket in buckets[1:]] == [False, False, False, True]
    assert are_equal(weights, targets)


def test_an_update_cannot_begin_in_the_middle():
    weights = small_weights()
    _, receiver = receiver_for(weights)
    with pytest.raises(LostBucketError, match="came without bucket 0 to 1; no update has begun"):
        receiver.apply(buckets_of(weights)[2])


def test_a_repeated_bucket_is_refused_and_the_update_goes_on():
    weights = small_weights()
    _, receiver = receiver_for(weights)
    buckets = buckets_of(weights)
    receiver.apply(buckets[0])
    with pytest.raises(RepeatedBucketError, match="bucket 0 of version 1"):
        receiver.apply(buckets[0])
    for bucket in buckets[1:]:
        receiver.apply(bucket)
    with pytest.raises(RepeatedBucketError, match=r"bucket 4 .* came again"):
        receiver.apply(buckets[4])
    assert receiver.version == 1


def test_buckets_of_an_older_version_or_attempt_are_refused():
    weights = small_weights()
    _, receiver = receiver_for(weights)
    sender = WeightSender(32)
    old = buckets_of(weights, version=1, sender=sender)
    abandoned = buckets_of(weights, version=2, sender=sender)
    again = buckets_of(weights, version=2, sender=sender)
    receiver.apply(abandoned[0])
    for bucket in again:  # the same version may be sent again from the start
        receiver.apply(bucket)
    for bucket in (old[0], old[1], abandoned[0], abandoned[1]):
        with pytest.raises(StaleBucketError, match=r"is over here\. .* call forget\(\) first"):
            receiver.apply(bucket)
    assert receiver.version == 2
    receiver.forget()
    assert receiver.held is None
    assert [receiver.apply(bucket) for bucket in old][-1]
    assert receiver.version == 1


def test_a_damaged_bucket_is_refused_before_a_byte_is_written():
    weights = small_weights()
    targets, receiver = receiver_for(weights)
    bucket = buckets_of(weights)[0]
    bucket.payload[3] ^= 16
    with pytest.raises(DamagedBucketError, match="bucket 0 of version 1"):
        receiver.apply(bucket)
    assert not targets["embed.weight"].any()
    with pytest.raises(DamagedBucketError):
        receiver.apply(replace(buckets_of(weights)[0], version=7))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop("scale"), r"is the last, but scale did not come whole"),
        (lambda weights: weights.update(extra=torch.zeros(1)), r"'extra' that this side does not"),
        (
            lambda weights: weights.update(scale=torch.zeros((), dtype=torch.float16)),
            r"scale as float16 \[\], here it is float32 \[\]; convert on the sending side",
        ),
        (
            lambda weights: weights.update({"embed.weight": torch.zeros(4, 6)}),
            r"embed.weight as float32 \[4, 6\], here it is float32 \[6, 4\]",
        ),
    ],
)
def test_weights_of_another_model_are_refused_by_name(change, message):
    weights = small_weights()
    _, receiver = receiver_for(weights)
    change(weights)
    with pytest.raises(WrongWeightsError, match=message):
        copy_weights(WeightSender(32), weights.items(), 1, receiver)
    assert receiver.held is None


def test_pieces_must_follow_each_other_inside_their_tensor():
    weights = {"a": torch.arange(16.0)}
    bucket = buckets_of(weights, bucket_bytes=32)[0]
    for field, value in (("tensor_start", 4), ("num_bytes", 80), ("payload_start", 16)):
        piece = bucket.pieces[0]._replace(**{field: value})
        forged = replace(bucket, pieces=(piece,)).sealed()
        with pytest.raises(WrongWeightsError, match=r"of a, which has 64 and next needs byte 0"):
            receiver_for(weights)[1].apply(forged)


def test_content_that_is_not_what_was_sent_is_found_by_name_and_never_served():
    weights = small_weights()
    targets, receiver = receiver_for(weights)
    buckets = buckets_of(weights)
    for bucket in buckets[:-1]:
        receiver.apply(bucket)
    targets["embed.weight"][0, 0] += 1  # somebody else writes while the update runs
    with pytest.raises(FingerprintError, match=r"but embed\.weight hold something else"):
        receiver.apply(buckets[-1])
    assert receiver.held is None
    copy_weights(WeightSender(), weights.items(), 2, receiver)
    assert are_equal(weights, targets)


def test_an_update_without_weights_or_with_a_name_twice_is_refused():
    with pytest.raises(ValueError, match="no weights to send as version 1"):
        list(WeightSender().buckets([], 1))
    with pytest.raises(ValueError, match="'a' was given twice"):
        list(WeightSender().buckets([("a", torch.zeros(1))] * 2, 1))
    with pytest.raises(ValueError, match="a bucket of 0 bytes"):
        WeightSender(0)


def test_targets_must_be_contiguous():
    with pytest.raises(ValueError, match="wide are not contiguous"):
        WeightReceiver({"wide": torch.zeros(4, 4).T})


def test_a_tensor_that_is_not_contiguous_can_be_sent():
    weights = {"wide": torch.arange(12.0).view(3, 4).T}
    targets = {"wide": torch.zeros(4, 3)}
    copy_weights(WeightSender(), weights.items(), 1, WeightReceiver(targets))
    assert torch.equal(targets["wide"], weights["wide"])


def test_the_sender_uses_the_memory_of_one_bucket_however_large_the_model():
    bucket_bytes = 2**16

    def weights():
        for place in range(64):
            yield f"layer.{place}", torch.full((2**12,), float(place))  # 16 KB each, 1 MB in all

    storages = [
        (bucket.payload.data_ptr(), bucket.payload.untyped_storage().nbytes())
        for bucket in WeightSender(bucket_bytes).buckets(weights(), 1)
    ]
    assert len(storages) == 16
    assert len(set(storages)) == 1
    assert storages[0][1] == bucket_bytes

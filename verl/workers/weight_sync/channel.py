"""The way from one sender to its receivers, and the two calls that use it.

    send_weights                              receive_weights (one per receiver)
    ------------                              ---------------
    send(bucket) ...      ----------->        receive() -> apply
    send(last bucket)     ----------->        receive() -> apply, hash what is held
    confirmations()       <-----------        confirm(held, or None)

A receiver that refuses a bucket goes on reading until the last one, so that nobody else in a
collective waits for it, and then says what it holds. Every wait has a deadline, which belongs to
the channel. Within one process there is nothing to wait for: `copy_weights`.
"""

from abc import ABC, abstractmethod

from verl.workers.weight_sync.bucket import Bucket, Published
from verl.workers.weight_sync.errors import SyncRefusedError, WeightSyncError
from verl.workers.weight_sync.receiver import WeightReceiver
from verl.workers.weight_sync.sender import NamedTensors, WeightSender, published_by

_REFUSED, _HOLDS = b"refused", b"holds"
_NUMBER = 8  # bytes


class SendingChannel(ABC):
    """The sender's end."""

    @abstractmethod
    def send(self, bucket: Bucket) -> None:
        """Hand a bucket to every receiver; its memory is free again on return."""

    @abstractmethod
    def confirmations(self) -> list[Published | None]:
        """What each receiver holds after the last bucket; None if it refused the update."""


class ReceivingChannel(ABC):
    """A receiver's end."""

    @abstractmethod
    def receive(self) -> Bucket:
        """The next bucket; its memory is free again when the next one is asked for."""

    @abstractmethod
    def confirm(self, held: Published | None) -> None:
        """Tell the sender how the update ended here."""


def send_weights(
    sender: WeightSender, weights: NamedTensors, version: int, channel: SendingChannel
) -> Published:
    """Send one version to all receivers; raises unless every one of them holds it."""
    published = None
    for bucket in sender.buckets(weights, version):
        if bucket.is_last:
            published = published_by(bucket)
        channel.send(bucket)
    assert published is not None  # an update ends with its last bucket
    held = channel.confirmations()
    refused = [place for place, answer in enumerate(held) if answer != published]
    if refused:
        raise SyncRefusedError(
            f"version {version} was sent, but {len(refused)} of {len(held)} receivers (numbers "
            f"{refused}) do not hold it; they serve nothing. Their own errors say why; send again"
        )
    return published


def receive_weights(receiver: WeightReceiver, channel: ReceivingChannel) -> Published:
    """Take one update in; raises the first refusal unless the update became complete."""
    refusal: WeightSyncError | None = None
    while True:
        bucket = channel.receive()
        is_complete = False
        try:
            is_complete = receiver.apply(bucket)
        except WeightSyncError as error:
            refusal = refusal or error
        if bucket.is_last:
            break
    channel.confirm(receiver.held if is_complete else None)
    if is_complete:
        return receiver.require_ready()
    assert refusal is not None  # a last bucket that is not refused completes its update
    raise refusal


def copy_weights(
    sender: WeightSender, weights: NamedTensors, version: int, receiver: WeightReceiver
) -> Published:
    """Send within one process: into the tensors of `receiver`, and prove that they arrived."""
    for bucket in sender.buckets(weights, version):
        receiver.apply(bucket)
    return receiver.require_ready()


def format_confirmation(held: Published | None) -> bytes:
    if held is None:
        return _REFUSED
    return _HOLDS + b"".join(number.to_bytes(_NUMBER, "big") for number in held)


def parse_confirmation(answer: bytes) -> Published | None:
    """What a receiver says at the end; anything else than a version it holds is a refusal."""
    numbers = answer.removeprefix(_HOLDS)
    if not answer.startswith(_HOLDS) or len(numbers) != 2 * _NUMBER:
        return None
    return Published(
        int.from_bytes(numbers[:_NUMBER], "big"), int.from_bytes(numbers[_NUMBER:], "big")
    )

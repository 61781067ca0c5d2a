"""From named tensors to buckets, and from one sender to its receivers.

    send_weights                              receive_weights (one per receiver)
    ------------                              ---------------
    send(bucket) ...      ----------->        receive() -> apply
    send(last bucket)     ----------->        receive() -> apply, hash what is held
    confirmations()       <-----------        confirm(held, or None)

The sender holds one bucket and the tensor that its source has just yielded, never the model. A
tensor larger than a bucket is cut; small ones share a bucket. A receiver that refuses a bucket
reads on until the last one and then confirms what it holds. Every wait has a deadline, which
belongs to the channel. Within one process there is nothing to wait for: `copy_weights`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from verl.workers.weight_sync.bucket import (
    BlockSums,
    Bucket,
    Manifest,
    Piece,
    Published,
    SyncRefusedError,
    TensorKind,
    WeightSyncError,
    block_sums,
    byte_view,
    empty_payload,
    fingerprint_of,
    manifest_of,
)
from verl.workers.weight_sync.receiver import WeightReceiver

NamedTensors = Iterable[tuple[str, Tensor]]
DEFAULT_BUCKET_BYTES = 2048 * 2**20


class WeightSender:
    """Cuts each version of the weights into buckets; one sender serves all updates of a run."""

    def __init__(self, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> None:
        if bucket_bytes < 1:
            raise ValueError(f"a bucket of {bucket_bytes} bytes holds nothing; give at least 1")
        self.bucket_bytes = bucket_bytes
        self._num_updates = 0

    def buckets(self, weights: NamedTensors, version: int) -> Iterator[Bucket]:
        """The buckets of one update. Each is overwritten when the next one is asked for."""
        self._num_updates += 1
        filling = _Filling(self.bucket_bytes, version, self._num_updates)
        sums: dict[TensorKind, BlockSums] = {}
        names: set[str] = set()
        for name, tensor in weights:
            if name in names:
                raise ValueError(f"weight {name!r} was given twice; tied weights are sent once")
            names.add(name)
            tensor = tensor.detach().contiguous()
            kind = TensorKind.of(name, tensor)
            sums[kind] = block_sums(tensor)
            yield from filling.add(kind, byte_view(tensor))
        if not sums:
            raise ValueError(f"there are no weights to send as version {version}")
        yield filling.close(manifest_of(sums))


def published_by(bucket: Bucket) -> Published:
    """What holders of an update can call their own, told by its last bucket."""
    assert bucket.manifest is not None
    return Published(bucket.version, fingerprint_of(bucket.manifest))


class _Filling:
    """The bucket that is being filled; its memory is used again for the next."""

    def __init__(self, capacity: int, version: int, attempt: int) -> None:
        self._capacity = capacity
        self._version = version
        self._attempt = attempt
        self._index = 0
        self._pieces: list[Piece] = []
        self._memory = empty_payload(0)
        self._used = 0

    def add(self, kind: TensorKind, content: Tensor) -> Iterator[Bucket]:
        """Take all bytes of a tensor in, giving out the buckets that become full on the way."""
        start = 0
        while start < len(content) or not len(content):
            if self._used == self._capacity:
                yield self.close(None)
            length = min(len(content) - start, self._capacity - self._used)
            self._reserve(self._used + length, content.device)
            self._memory[self._used : self._used + length].copy_(content[start : start + length])
            self._pieces.append(Piece(kind, start, self._used, length))
            self._used += length
            start += length
            if not len(content):  # a tensor without elements is a piece without bytes
                return

    def close(self, manifest: Manifest | None) -> Bucket:
        bucket = Bucket(
            version=self._version,
            attempt=self._attempt,
            index=self._index,
            pieces=tuple(self._pieces),
            payload=self._memory[: self._used],
            manifest=manifest,
        ).sealed()
        self._index += 1
        self._pieces = []
        self._used = 0
        return bucket

    def _reserve(self, num_bytes: int, device: torch.device) -> None:
        """Grow by doubling, so that a small model never takes the memory of a large bucket."""
        if num_bytes <= len(self._memory):
            return
        size = min(self._capacity, max(num_bytes, 2 * len(self._memory)))
        grown = empty_payload(size, device)
        grown[: self._used].copy_(self._memory[: self._used])
        self._memory = grown


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
    refused = [index for index, answer in enumerate(held) if answer != published]
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

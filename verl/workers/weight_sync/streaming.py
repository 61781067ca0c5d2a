"""Whole tensors out of buckets, one after another, for an engine that has its own way to load them.

    channel --bucket--> checked --pieces--> tensor whole, hashed --> the engine takes it
                                                ... last bucket --> all hashes equal to those sent?

`WeightReceiver` writes into tensors it knows; here nobody knows where an engine puts what, so each
tensor is handed on as soon as its bytes are here and checked. Memory is that of one bucket and one
tensor, whatever the size of the model. What has been handed on cannot be taken back: any fault ends
the update, and until a whole one has come through the engine must not generate.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from math import prod

import torch
from torch import Tensor

from verl.workers.weight_sync.bucket import (
    BlockSums,
    Bucket,
    ChannelError,
    FingerprintError,
    LostBucketError,
    Manifest,
    Piece,
    Published,
    RepeatedBucketError,
    StaleBucketError,
    TensorKind,
    WeightSyncError,
    WrongWeightsError,
    block_sums,
    byte_view,
    fingerprint_of,
    manifest_of,
)
from verl.workers.weight_sync.channel import ReceivingChannel
from verl.workers.weight_sync.receiver import shown

LoadWeights = Callable[[Iterable[tuple[str, Tensor]]], None]


def stream_weights(channel: ReceivingChannel, load: LoadWeights) -> Published:
    """Let `load` take one update from the channel; raises unless all of it was as sent.

    The sender learns how it ended either way.
    """
    stream = WeightStream(channel)
    try:
        load(stream)
        published = stream.require_complete()
    except ChannelError:
        raise
    except BaseException:
        with suppress(WeightSyncError):  # what went wrong first is raised
            stream.read_to_the_end()
            channel.confirm(None)
        raise
    channel.confirm(published)
    return published


class WeightStream:
    """One update as an iterable of names and tensors; those who iterate own the tensors."""

    def __init__(self, channel: ReceivingChannel) -> None:
        self._channel = channel
        self._update: tuple[int, int] | None = None  # version, attempt
        self._next_index = 0
        self._is_over = False
        self._begun: _Assembly | None = None
        self._sums: dict[TensorKind, BlockSums] = {}
        self._names: set[str] = set()
        self._published: Published | None = None

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        while not self._is_over:
            bucket = self._receive()
            bucket.check()
            self._check_turn(bucket)
            for piece in bucket.pieces:
                yield from self._add(bucket, piece)
            if bucket.manifest is not None:
                self._published = self._verified(bucket, bucket.manifest)

    def require_complete(self) -> Published:
        """What came through; raises if the reader stopped before the end, or over a fault."""
        if self._published is None:
            raise WrongWeightsError(
                f"the engine stopped taking weights after {len(self._sums)} tensors of this "
                "update; it must take all of them"
            )
        return self._published

    def read_to_the_end(self) -> None:
        """Let a sender that serves others too finish; nothing of it is used."""
        while not self._is_over:
            self._receive()

    def _receive(self) -> Bucket:
        bucket = self._channel.receive()
        self._is_over = bucket.is_last
        return bucket

    def _check_turn(self, bucket: Bucket) -> None:
        update = (bucket.version, bucket.attempt)
        if self._update is not None and update != self._update:
            raise StaleBucketError(
                f"{bucket} came among those of version {self._update[0]} (attempt "
                f"{self._update[1]}); send the update again"
            )
        if bucket.index < self._next_index:
            raise RepeatedBucketError(f"{bucket} came twice; send the update again")
        if bucket.index > self._next_index:
            raise LostBucketError(
                f"{bucket} came before bucket {self._next_index}; send the update again"
            )
        self._update = update
        self._next_index += 1

    def _add(self, bucket: Bucket, piece: Piece) -> Iterator[tuple[str, Tensor]]:
        if self._begun is None:
            if piece.kind.name in self._names:
                raise WrongWeightsError(f"{bucket} has {piece.kind.name} a second time")
            self._names.add(piece.kind.name)
            self._begun = _Assembly(bucket, piece.kind)
        self._begun.add(bucket, piece)
        if self._begun.is_whole:
            tensor, self._begun = self._begun.tensor, None
            self._sums[piece.kind] = block_sums(tensor)
            yield piece.kind.name, tensor

    def _verified(self, bucket: Bucket, manifest: Manifest) -> Published:
        if self._begun is not None:
            raise WrongWeightsError(
                f"{bucket} is the last, but {self._begun.kind.name} is not whole"
            )
        absent = sorted(kind.name for kind in manifest.keys() ^ self._sums.keys())
        if absent:
            raise WrongWeightsError(
                f"{bucket} is the last, but {shown(absent)} did not come as announced; every "
                "weight must be in every update"
            )
        hashes = manifest_of(self._sums)
        different = [kind.name for kind in manifest if manifest[kind] != hashes[kind]]
        if different:
            raise FingerprintError(
                f"version {bucket.version} came whole, but {shown(different)} are not what was "
                "sent; nothing is served: send the weights again"
            )
        return Published(bucket.version, fingerprint_of(hashes))


class _Assembly:
    """A tensor whose bytes are coming."""

    def __init__(self, bucket: Bucket, kind: TensorKind) -> None:
        dtype = vars(torch).get(kind.dtype)
        if not isinstance(dtype, torch.dtype):
            raise WrongWeightsError(
                f"{bucket} has {kind.name} as {kind.dtype!r}, which torch does not know"
            )
        self.kind = kind
        self.tensor = torch.empty(kind.shape, dtype=dtype, device=bucket.payload.device)
        self._num_bytes = prod(kind.shape) * dtype.itemsize
        self._num_received = 0

    @property
    def is_whole(self) -> bool:
        return self._num_received == self._num_bytes

    def add(self, bucket: Bucket, piece: Piece) -> None:
        end, payload_end = (
            piece.tensor_start + piece.num_bytes,
            piece.payload_start + piece.num_bytes,
        )
        is_next = piece.kind == self.kind and piece.tensor_start == self._num_received
        if not is_next or end > self._num_bytes or payload_end > len(bucket.payload):
            raise WrongWeightsError(
                f"{bucket} has bytes {piece.tensor_start} to {end} of {piece.kind.name}; next is "
                f"byte {self._num_received} of {self._num_bytes} of {self.kind.name}"
            )
        content = bucket.payload[piece.payload_start : payload_end]
        byte_view(self.tensor)[piece.tensor_start : end].copy_(content)
        self._num_received = end

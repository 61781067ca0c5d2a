"""From named tensors to buckets.

The sender holds one bucket and whatever tensor its source has just yielded, never the model. A
tensor larger than a bucket is cut; small ones share a bucket.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from verl.workers.weight_sync.bucket import (
    Bucket,
    Manifest,
    Piece,
    Published,
    TensorKind,
    empty_payload,
    fingerprint_of,
)
from verl.workers.weight_sync.fingerprint import byte_view, content_hash

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
        manifest: Manifest = {}
        names: set[str] = set()
        for name, tensor in weights:
            if name in names:
                raise ValueError(f"weight {name!r} was given twice; tied weights are sent once")
            names.add(name)
            tensor = tensor.detach().contiguous()
            kind = TensorKind.of(name, tensor)
            manifest[kind] = content_hash(tensor)
            yield from filling.add(kind, byte_view(tensor))
        if not manifest:
            raise ValueError(f"there are no weights to send as version {version}")
        yield filling.close(manifest)


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

"""Buckets into the tensors that an engine generates with.

    nothing held --bucket 0--> torn --buckets in order--> all applied --fingerprints equal--> held
                                ^                                                              |
                                +-------------------- bucket 0 of a later update --------------+

A bucket is checked as a whole before one byte of it is written, and a refused bucket changes
nothing: the right one may still come. From the first byte of an update until the receiver has
hashed what it holds and found what the sender published, it is torn and `require_ready` raises.
Updates are ordered by version and attempt; the receiver only moves forward.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from verl.workers.weight_sync.bucket import (
    Bucket,
    FingerprintError,
    LostBucketError,
    Manifest,
    Piece,
    Published,
    RepeatedBucketError,
    StaleBucketError,
    TensorKind,
    WeightsNotReadyError,
    WrongWeightsError,
    block_sums,
    byte_view,
    fingerprint_of,
    manifest_of,
)

NAMES_SHOWN = 5


class WeightReceiver:
    """Writes updates into `targets`, in place; their addresses never change."""

    def __init__(self, targets: Mapping[str, Tensor]) -> None:
        self._targets = dict(targets)
        self._kinds = {name: TensorKind.of(name, target) for name, target in targets.items()}
        strided = [name for name, target in targets.items() if not target.is_contiguous()]
        if strided:
            raise ValueError(
                f"weights are written as consecutive bytes, and {shown(strided)} are not "
                "contiguous; give the receiver contiguous tensors"
            )
        self._held: Published | None = None
        self.forget()

    @property
    def held(self) -> Published | None:
        """The version that is complete and verified; None before the first, and while torn."""
        return self._held

    @property
    def version(self) -> int:
        """Version of the weights in use; raises while there are none."""
        return self.require_ready().version

    def require_ready(self, published: Published | None = None) -> Published:
        """What this side holds. Raises when torn or empty, or when it is not `published`."""
        if self._held is None:
            begun = "no update has begun" if self._update is None else f"{self._progress()}"
            raise WeightsNotReadyError(
                f"no complete version of the weights is here ({begun}); nothing is served until "
                "an update has arrived whole: send the weights again"
            )
        if published is not None and self._held != published:
            raise WeightsNotReadyError(
                f"version {self._held.version} with fingerprint {self._held.fingerprint:#018x} is "
                f"here, asked for is version {published.version} with "
                f"{published.fingerprint:#018x}; send that version first"
            )
        return self._held

    def forget(self) -> None:
        """Serve nothing until the next update, whatever its version: the sender started over."""
        self._held = None
        self._update: tuple[int, int] | None = None  # (version, attempt) of the latest begun
        self._next_index = 0
        self._is_over = True
        self._num_received = dict.fromkeys(self._targets, -1)

    def apply(self, bucket: Bucket) -> bool:
        """Write one bucket; True when it completed its update, which is now held and verified.

        A bucket that is damaged, old, repeated, early or of another model raises and is not
        written.
        """
        bucket.check()
        begins = self._check_turn(bucket)
        received = dict.fromkeys(self._targets, -1) if begins else dict(self._num_received)
        for piece in bucket.pieces:
            self._check_piece(bucket, piece, received)
        if bucket.manifest is not None:
            self._check_complete(bucket, bucket.manifest, received)
        self._held = None
        self._update = (bucket.version, bucket.attempt)
        self._next_index = bucket.index + 1
        self._num_received = received
        self._is_over = bucket.is_last
        self._write(bucket)
        if bucket.manifest is not None:
            self._held = self._verified(bucket.version, bucket.manifest)
        return bucket.is_last

    # ---- checking a bucket -------------------------------------------------------------------

    def _check_turn(self, bucket: Bucket) -> bool:
        """Whether this bucket begins a new update; raises when it is not its turn."""
        update = (bucket.version, bucket.attempt)
        if self._update is None or update > self._update:
            if bucket.index:
                raise LostBucketError(
                    f"{bucket} came without bucket 0 to {bucket.index - 1}; {self._progress()}"
                )
            return True
        if update < self._update or (self._is_over and bucket.index >= self._next_index):
            raise StaleBucketError(
                f"{bucket} belongs to an update that is over; {self._progress()}. If the sender "
                "went back to an earlier version, call forget() first"
            )
        if bucket.index < self._next_index:
            raise RepeatedBucketError(f"{bucket} came again; {self._progress()}")
        if bucket.index > self._next_index:
            raise LostBucketError(
                f"{bucket} came before bucket {self._next_index}; {self._progress()}"
            )
        return False

    def _check_piece(self, bucket: Bucket, piece: Piece, received: dict[str, int]) -> None:
        name, payload_end = piece.kind.name, piece.payload_start + piece.num_bytes
        self._check_kind(bucket, piece.kind)
        expected = max(0, received[name])
        is_inside = piece.tensor_start + piece.num_bytes <= byte_size(self._targets[name])
        if piece.tensor_start != expected or not is_inside or payload_end > len(bucket.payload):
            raise WrongWeightsError(
                f"{bucket} has bytes {piece.tensor_start} to {piece.tensor_start + piece.num_bytes}"
                f" of {name}, which has {byte_size(self._targets[name])} and next needs "
                f"byte {expected}"
            )
        received[name] = expected + piece.num_bytes

    def _check_kind(self, bucket: Bucket, kind: TensorKind) -> None:
        own = self._kinds.get(kind.name)
        if own is None:
            raise WrongWeightsError(
                f"{bucket} has a weight {kind.name!r} that this side does not know; it has "
                f"{shown(self._kinds)}. Both sides must load the same model"
            )
        if own != kind:
            raise WrongWeightsError(
                f"{bucket} has {kind.name} as {kind.dtype} {list(kind.shape)}, here it is "
                f"{own.dtype} {list(own.shape)}; convert on the sending side, so that both "
                "sides hold the same bytes"
            )

    def _check_complete(
        self, bucket: Bucket, manifest: Manifest, received: Mapping[str, int]
    ) -> None:
        for kind in manifest:
            self._check_kind(bucket, kind)
        absent = sorted(self._kinds.keys() - {kind.name for kind in manifest})
        partial = [name for name in self._kinds if received[name] < byte_size(self._targets[name])]
        if absent or partial:
            raise WrongWeightsError(
                f"{bucket} is the last, but {shown(absent or partial)} did not come whole; "
                "every weight must be in every update"
            )

    # ---- writing and proving -----------------------------------------------------------------

    @torch.no_grad()
    def _write(self, bucket: Bucket) -> None:
        for piece in bucket.pieces:
            content = bucket.payload[piece.payload_start : piece.payload_start + piece.num_bytes]
            target = byte_view(self._targets[piece.kind.name])
            target[piece.tensor_start : piece.tensor_start + piece.num_bytes].copy_(content)

    def _verified(self, version: int, manifest: Manifest) -> Published:
        held = self._hashes()
        different = sorted(kind.name for kind in manifest if held[kind] != manifest[kind])
        if different:
            raise FingerprintError(
                f"version {version} was applied whole, but {shown(different)} hold something else "
                "than was sent; something writes to them, or the copy fails. Nothing is served: "
                "send the weights again"
            )
        return Published(version, fingerprint_of(held))

    def _hashes(self) -> Manifest:
        return manifest_of(
            {self._kinds[name]: block_sums(target) for name, target in self._targets.items()}
        )

    def _progress(self) -> str:
        if self._update is None:
            return "no update has begun"
        version, attempt = self._update
        state = "over" if self._is_over else f"waiting for bucket {self._next_index}"
        return f"version {version} (attempt {attempt}) is {state} here"


def byte_size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def shown(names: "Mapping[str, object] | list[str]") -> str:
    """The first few names, and how many more there are."""
    first = ", ".join(list(names)[:NAMES_SHOWN])
    return first if len(names) <= NAMES_SHOWN else f"{first} and {len(names) - NAMES_SHOWN} more"

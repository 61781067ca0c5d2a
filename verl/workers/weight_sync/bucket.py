"""`Bucket`: a bounded number of bytes of some weights, and all that is needed to judge them.

A bucket says which update it belongs to (version and attempt), its place in it, which bytes of
which tensors it carries and where they stand in the payload. Its checksum covers all of that and
the payload. The last bucket of an update also has the manifest: every tensor with its shape, number
format and hash. On the wire a bucket is a header, which is JSON, and the payload.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import Tensor

from verl.workers.weight_sync.errors import DamagedBucketError
from verl.workers.weight_sync.fingerprint import combine, content_hash

MAX_HEADER_BYTES = 64 * 2**20


class Published(NamedTuple):
    """A version of the weights and the fingerprint of its content."""

    version: int
    fingerprint: int


class TensorKind(NamedTuple):
    """What a tensor is, apart from its numbers."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> "TensorKind":
        return cls(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))

    @property
    def identity(self) -> str:
        return f"{self.name}|{self.dtype}|{self.shape}"


class Piece(NamedTuple):
    """Consecutive bytes of one tensor, and where they stand in the payload."""

    kind: TensorKind
    tensor_start: int
    payload_start: int
    num_bytes: int


Manifest = dict[TensorKind, int]
"""Every tensor of an update and the hash of its content."""


def fingerprint_of(manifest: Manifest) -> int:
    """One number for a whole model: content, names, shapes and number formats."""
    return combine((kind.identity, content) for kind, content in manifest.items())


@dataclass(frozen=True, kw_only=True)
class Bucket:
    version: int
    attempt: int
    """Counts the sender's updates, so that two attempts at one version are told apart."""

    index: int
    pieces: tuple[Piece, ...]
    payload: Tensor
    """(bytes,) uint8. Valid until the sender is asked for the next bucket."""

    manifest: Manifest | None = None
    """On the last bucket only."""

    checksum: str = ""

    @property
    def is_last(self) -> bool:
        return self.manifest is not None

    def __str__(self) -> str:
        return f"bucket {self.index} of version {self.version} (attempt {self.attempt})"

    def sealed(self) -> "Bucket":
        """The same with its checksum."""
        return replace(self, checksum=self._content_checksum())

    def check(self) -> None:
        """Raise unless this is what was sealed."""
        actual = self._content_checksum()
        if actual != self.checksum:
            raise DamagedBucketError(
                f"{self} was damaged on its way: its checksum is {actual}, sent was "
                f"{self.checksum}; it has not been applied, send the update again"
            )

    def header(self) -> bytes:
        return json.dumps({**self._fields(), "checksum": self.checksum}).encode()

    @classmethod
    def from_wire(cls, header: bytes, payload: Tensor) -> "Bucket":
        """The bucket with this header; whether it is intact is for `check` to say."""
        try:
            return _parse(json.loads(header), payload)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise DamagedBucketError(
                f"the header of a bucket with {len(payload)} bytes cannot be read ({error!r}); "
                "nothing of it has been applied, send the update again"
            ) from error

    def _content_checksum(self) -> str:
        fields = json.dumps(self._fields()).encode()
        content = content_hash(self.payload).to_bytes(8, "big")
        return blake2b(fields + content, digest_size=16).hexdigest()

    def _fields(self) -> dict[str, Any]:
        manifest = None if self.manifest is None else list(self.manifest.items())
        return {
            "version": self.version,
            "attempt": self.attempt,
            "index": self.index,
            "num_bytes": len(self.payload),
            "pieces": self.pieces,
            "manifest": manifest,
        }


def empty_payload(num_bytes: int, device: torch.device | str = "cpu") -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def _parse(fields: Any, payload: Tensor) -> Bucket:
    if fields["num_bytes"] != len(payload):
        raise ValueError(f"{fields['num_bytes']} bytes were announced")
    manifest = fields["manifest"]
    return Bucket(
        version=_integer(fields["version"]),
        attempt=_integer(fields["attempt"]),
        index=_integer(fields["index"]),
        pieces=tuple(Piece(_kind(kind), *_integers(place)) for kind, *place in fields["pieces"]),
        payload=payload,
        manifest=None if manifest is None else {_kind(k): _integer(h) for k, h in manifest},
        checksum=str(fields["checksum"]),
    )


def _kind(fields: Any) -> TensorKind:
    name, dtype, shape = fields
    return TensorKind(str(name), str(dtype), tuple(_integers(shape)))


def _integers(values: Iterable[Any]) -> list[int]:
    return [_integer(value) for value in values]


def _integer(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value

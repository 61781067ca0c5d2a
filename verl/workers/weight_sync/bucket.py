"""`Bucket`: a bounded number of bytes of some weights, with checksum, manifest and fingerprint.

A bucket says which update it belongs to (version and attempt), its index in it, which bytes of
which tensors it carries and where they are in the payload. Its checksum covers all of that and the
payload. The last bucket of an update also has the manifest: every tensor with its shape, number
format and hash. On the wire a bucket is a header, which is JSON, and the payload.

A tensor's hash is computed on its device. Its bytes are read as 32-bit words w_i, in blocks of
2^16. With fixed odd 64-bit multipliers a_i,

    block_b = sum_i a_i w_i                                                mod 2^64
    hash    = scramble(num_bytes + sum_b scramble(block_b + b GOLDEN))     mod 2^64

Only integer products and sums, so a CPU and a GPU agree to the bit and no byte leaves the device.
One changed word always changes its block, because a_i is odd; other damage goes unnoticed with a
probability below 2^-32. That is enough against accidents, and no defence against an attacker: who
may send weights at all is for the channel to decide.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from verl.utils.scramble import GOLDEN, scramble

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
    """Set on the last bucket only."""

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
        pieces=tuple(Piece(_kind(kind), *_integers(span)) for kind, *span in fields["pieces"]),
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


class WeightSyncError(RuntimeError):
    """Weights did not arrive as they were sent. The receiver serves nothing it is not sure of."""


class DamagedBucketError(WeightSyncError):
    """A bucket is not what its checksum says, or cannot be read."""


class StaleBucketError(WeightSyncError):
    """A bucket belongs to an update that is over: an old version, or an earlier attempt."""


class RepeatedBucketError(WeightSyncError):
    """A bucket of the running update came twice; the second one changed nothing."""


class LostBucketError(WeightSyncError):
    """A bucket came before its predecessor, which is late or lost."""


class WrongWeightsError(WeightSyncError):
    """Names, shapes or number formats differ between the two sides."""


class FingerprintError(WeightSyncError):
    """All buckets were applied, and the receiver still holds something else than was sent."""


class WeightsNotReadyError(WeightSyncError):
    """The receiver holds no complete version, or not the one that was asked for."""


class SyncRefusedError(WeightSyncError):
    """The sender's view: one or more receivers do not hold the version that was sent."""


class ChannelError(WeightSyncError):
    """The way between the two sides failed: closed, too slow, or a peer without the token."""


class NoRoomError(ChannelError):
    """The sender has no shared memory for a bucket; the receiver knows nothing of it."""


WORD_BYTES = 4
BLOCK_WORDS = 2**16
BLOCK_BYTES = BLOCK_WORDS * WORD_BYTES
BLOCKS_AT_ONCE_ON_CPU = 1
"""Half a megabyte of products: they stay in a core's cache, and the allocator keeps the memory."""

BLOCKS_AT_ONCE = 64
_UNSIGNED = 2**64 - 1


def byte_view(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, as uint8 in its own memory."""
    return tensor.detach().view(-1).view(torch.uint8)


def content_hash(tensor: Tensor) -> int:
    """64 bits that depend on every byte of a contiguous tensor and on nothing else."""
    return content_hashes([block_sums(tensor)])[0]


class BlockSums(NamedTuple):
    """What remains to be hashed of a tensor: its length and the sums of its blocks."""

    num_bytes: int
    blocks: Tensor
    """(blocks,) int64, on the tensor's device."""


@torch.no_grad()
def block_sums(tensor: Tensor) -> BlockSums:
    """Read every byte of a contiguous tensor. Nothing waits for the device."""
    content = byte_view(tensor)
    if content.storage_offset() % WORD_BYTES:  # words cannot be read across their alignment
        content = content.clone()
    num_whole = len(content) // BLOCK_BYTES
    whole, rest = content[: num_whole * BLOCK_BYTES], content[num_whole * BLOCK_BYTES :]
    return BlockSums(len(content), torch.cat([*_whole_blocks(whole), _last_block(rest)]))


@torch.no_grad()
def content_hashes(sums: Sequence[BlockSums]) -> list[int]:
    """The hashes of many tensors at once: a device is waited for once, and gets few kernels."""
    if not sums:
        return []
    device = sums[0].blocks.device
    counts = [len(blocks) for _, blocks in sums]
    blocks = torch.cat([blocks.to(device) for _, blocks in sums])  # (all blocks,) int64
    indices = torch.cat([torch.arange(1, count + 1) for count in counts]).to(device)
    owners = torch.arange(len(sums)).repeat_interleave(torch.tensor(counts)).to(device)
    sizes = torch.tensor([num_bytes for num_bytes, _ in sums], device=device)  # (tensors,)
    mixed = sizes.index_add_(0, owners, scramble(blocks + indices * GOLDEN))
    return [value & _UNSIGNED for value in scramble(mixed).tolist()]


def manifest_of(sums: Mapping[TensorKind, BlockSums]) -> Manifest:
    return dict(zip(sums, content_hashes([*sums.values()]), strict=True))


def combine(identified_hashes: Iterable[tuple[str, int]]) -> int:
    """One number for many tensors, each with a text that says what it is; order does not matter."""
    total = 0
    for identity, content in identified_hashes:
        digest = blake2b(identity.encode() + b"\0" + content.to_bytes(8, "big"), digest_size=8)
        total += int.from_bytes(digest.digest(), "big")
    return total & _UNSIGNED


def _whole_blocks(content: Tensor) -> list[Tensor]:
    words = content.view(torch.int32).view(-1, BLOCK_WORDS)
    factors = _factors(content.device)
    size = BLOCKS_AT_ONCE_ON_CPU if content.device.type == "cpu" else BLOCKS_AT_ONCE
    return [part.long().mul_(factors).sum(-1) for part in words.split(size)]


def _last_block(content: Tensor) -> Tensor:
    words = F.pad(content, (0, -len(content) % WORD_BYTES)).view(torch.int32).long()
    return (words * _factors(content.device)[: len(words)]).sum(-1, keepdim=True)


@cache
def _factors(device: torch.device) -> Tensor:
    return scramble(torch.arange(1, BLOCK_WORDS + 1, device=device) * GOLDEN) | 1

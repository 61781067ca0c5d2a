"""A number that says whether two tensors hold the same bytes, computed where the tensor lives.

The bytes are read as 32-bit words w_i, in blocks of 2^16. With fixed odd 64-bit multipliers a_i,

    block_b = sum_i a_i w_i                                                mod 2^64
    hash    = scramble(num_bytes + sum_b scramble(block_b + b GOLDEN))     mod 2^64

Only integer products and sums, so a CPU and a GPU agree to the bit and no byte leaves the device.
One changed word always changes its block, because a_i is odd; other damage goes unnoticed with a
probability below 2^-32. That is enough against accidents. It is no defence against somebody who
builds a collision: who may send weights at all is for the channel to decide.
"""

from collections.abc import Iterable
from functools import cache
from hashlib import blake2b

import torch
import torch.nn.functional as F
from torch import Tensor

from verl.utils.scramble import GOLDEN, scramble

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


@torch.no_grad()
def content_hash(tensor: Tensor) -> int:
    """64 bits that depend on every byte of a contiguous tensor and on nothing else."""
    content = byte_view(tensor)
    if content.storage_offset() % WORD_BYTES:  # words cannot be read across their alignment
        content = content.clone()
    num_whole = len(content) // BLOCK_BYTES
    whole, rest = content[: num_whole * BLOCK_BYTES], content[num_whole * BLOCK_BYTES :]
    blocks = torch.cat([*_whole_blocks(whole), _last_block(rest)])  # (blocks,) int64
    places = torch.arange(1, len(blocks) + 1, device=blocks.device)
    mixed = scramble(blocks + places * GOLDEN).sum()
    return int(scramble(mixed + len(content)).item()) & _UNSIGNED


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

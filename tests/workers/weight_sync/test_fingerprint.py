import pytest
import torch

from verl.utils.scramble import GOLDEN, scramble
from verl.workers.weight_sync.bucket import (
    BLOCK_BYTES,
    BLOCK_WORDS,
    BLOCKS_AT_ONCE_ON_CPU,
    TensorKind,
    block_sums,
    content_hash,
    content_hashes,
    fingerprint_of,
)

UNSIGNED = 2**64 - 1


def mixed(value: int) -> int:
    return int(scramble(torch.tensor((value + 2**63) % 2**64 - 2**63)).item())


def worked_by_hand(words: list[int], num_bytes: int) -> int:
    """The formula of the module, in Python's integers."""
    blocks = [words[i : i + BLOCK_WORDS] for i in range(0, len(words), BLOCK_WORDS)]
    if len(words) % BLOCK_WORDS == 0:
        blocks.append([])
    total = 0
    for place, block in enumerate(blocks, start=1):
        sums = sum((mixed(i * GOLDEN) | 1) * word for i, word in enumerate(block, start=1))
        total += mixed(sums + place * GOLDEN)
    return mixed(total + num_bytes) & UNSIGNED


def test_the_hash_is_the_formula():
    words = [5, -7, 2**31 - 1, -(2**31), 0]
    assert content_hash(torch.tensor(words, dtype=torch.int32)) == worked_by_hand(words, 20)
    assert content_hash(torch.tensor([1, 2, 3], dtype=torch.uint8)) == worked_by_hand([0x030201], 3)
    assert content_hash(torch.zeros(0)) == worked_by_hand([], 0)


def test_a_tensor_of_many_blocks_is_hashed_block_by_block():
    num_words = (BLOCKS_AT_ONCE_ON_CPU + 1) * BLOCK_WORDS + 3
    words = torch.zeros(num_words, dtype=torch.int32)
    changed = {0: 3, BLOCK_WORDS: -3, num_words - 1: 9}
    for place, word in changed.items():
        words[place] = word
    sums = [0] * (BLOCKS_AT_ONCE_ON_CPU + 2)
    for place, word in changed.items():
        sums[place // BLOCK_WORDS] += (mixed((place % BLOCK_WORDS + 1) * GOLDEN) | 1) * word
    total = sum(mixed(block + place * GOLDEN) for place, block in enumerate(sums, start=1))
    assert content_hash(words) == mixed(total + 4 * num_words) & UNSIGNED


def test_every_single_bit_counts():
    tensor = torch.randn(40).bfloat16()
    hashes = {content_hash(tensor)}
    for byte in range(80):
        for bit in range(8):
            flipped = tensor.clone()
            flipped.view(torch.uint8)[byte] ^= 1 << bit
            hashes.add(content_hash(flipped))
    assert len(hashes) == 1 + 80 * 8


def test_swapped_and_negated_numbers_count():
    tensor = torch.arange(1.0, 9.0)
    swapped = tensor[[1, 0, 2, 3, 4, 5, 6, 7]]
    negated = tensor * torch.tensor([1, -1, 1, -1, 1, 1, 1, 1])  # two high bits of two words
    shorter, longer = tensor[:7].clone(), torch.cat([tensor, torch.zeros(1)])
    variants = (tensor, swapped, negated, shorter, longer)
    assert len({content_hash(variant) for variant in variants}) == 5


def test_where_a_tensor_lies_does_not_matter():
    whole = torch.randint(0, 255, (101,), dtype=torch.uint8)
    assert content_hash(whole[1:]) == content_hash(whole[1:].clone())


def test_tensors_hashed_together_have_the_hashes_they_have_alone():
    sizes = (0, 3, 4, BLOCK_BYTES - 1, BLOCK_BYTES, 2 * BLOCK_BYTES + 5)
    tensors = [torch.arange(size, dtype=torch.uint8) for size in sizes]
    together = content_hashes([block_sums(tensor) for tensor in tensors])
    assert together == [content_hash(tensor) for tensor in tensors]
    assert len(set(together)) == len(sizes)
    assert content_hashes([]) == []


def test_the_fingerprint_depends_on_names_formats_and_shapes_and_not_on_order():
    first = TensorKind.of("a", torch.zeros(2, 3)), 1
    second = TensorKind.of("b", torch.zeros(6)), 2
    fingerprint = fingerprint_of(dict([first, second]))
    assert fingerprint == fingerprint_of(dict([second, first]))
    others = [
        {TensorKind("b", "float32", (2, 3)): 1, TensorKind("a", "float32", (6,)): 2},
        {TensorKind("a", "int32", (2, 3)): 1, second[0]: 2},
        {TensorKind("a", "float32", (3, 2)): 1, second[0]: 2},
        {first[0]: 2, second[0]: 1},
        {first[0]: 1},
    ]
    assert fingerprint not in [fingerprint_of(other) for other in others]


@pytest.mark.gpu
def test_a_gpu_computes_the_same_hash():
    tensor = torch.randn(3 * 2**20 + 5)
    assert content_hash(tensor.cuda()) == content_hash(tensor)

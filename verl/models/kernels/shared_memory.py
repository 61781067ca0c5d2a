"""What attention kernels ask of shared memory, and what gives way where a device has too little.

A program keeps its queries there, the blocks of keys and values that are on their way, and the
weights of one block. A kernel that asks for more than the device has is not launched, so fewer
blocks are under way there, and where even one is too many a program takes fewer queries. Neither
changes a bit of the result; where blocks of keys begin would, and stays as it is.

Sizes are those that Triton's compiler finds. On Hopper, whose matrix instructions read from shared
memory, kernels for 16-bit formats take two blocks more; heads of up to 256 leave room for them.
"""

import functools

import torch
from torch import Tensor

LARGE = 160 << 10
"""Bytes that wide heads take when several blocks of keys are on their way."""

FEWEST_ROWS = 16
"""Queries that a matrix instruction takes at least, and dimensions."""


@functools.cache
def shared_memory_bytes(device: torch.device) -> int | None:
    """How much a program may have; None where it does not matter.

    227 KB on Hopper, 163 KB on an A100, 99 KB on most others from Ampere on.
    """
    if device.type != "cuda":
        return None
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def has_large_shared_memory(device: torch.device) -> bool:
    """Whether a program may have as much of it as on an A100 or later data-centre GPUs."""
    room = shared_memory_bytes(device)
    return room is None or room >= LARGE


def stages_that_fit(
    num_stages: int, query: Tensor, num_rows: int, *, num_keys: int, is_paged: bool = False
) -> int:
    """At most `num_stages`, for programs of `num_rows` of the queries (..., D).

    They go over blocks of `num_keys` keys and values, which are at most as wide as the queries.
    """
    room = shared_memory_bytes(query.device)
    if room is None:
        return num_stages
    fitting = (
        stages
        for stages in range(num_stages, 1, -1)
        if attention_bytes(query, num_rows, stages, num_keys=num_keys, is_paged=is_paged) <= room
    )
    return next(fitting, 1)


def rows_that_fit(num_rows: int, query: Tensor, *, num_keys: int) -> int:
    """At most `num_rows`, a power of 2: queries of a program that has one stage or more."""
    room = shared_memory_bytes(query.device)
    if room is None:
        return num_rows
    while num_rows > FEWEST_ROWS and attention_bytes(query, num_rows, 1, num_keys=num_keys) > room:
        num_rows //= 2
    return num_rows


def attention_bytes(
    query: Tensor, num_rows: int, num_stages: int, *, num_keys: int, is_paged: bool = False
) -> int:
    """What a program of `num_rows` queries asks for at most.

    With one stage a block passes through on its way to the registers, keys before values. Each
    further stage holds one of both; with pages every second does, the others hold pages' numbers.
    """
    size = query.element_size()
    width = max(FEWEST_ROWS, 1 << (query.shape[-1] - 1).bit_length()) * size
    num_pairs = num_stages // 2 if is_paged else num_stages - 1
    num_blocks = max(1, 2 * num_pairs)
    weights = num_rows * (num_keys + 1) * size
    page_numbers = 16 if is_paged else 0
    return num_rows * width + num_blocks * num_keys * width + weights + page_numbers

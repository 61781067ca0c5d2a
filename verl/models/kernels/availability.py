"""Whether our Triton kernels can run on a device, and how much shared memory they may ask for.

Where they cannot run, callers use plain torch. On a GPU that is slower and takes more memory, so
the reason is logged once: the triton package is absent, the GPU is older than the kernels, or
AMD's.

An attention program keeps its queries in shared memory, the blocks of keys and values in flight,
and the weights of one block. A kernel that asks for more than the device has is not launched, so
fewer blocks are in flight there, and where even one is too many a program takes fewer queries.
Neither changes a bit of the result; where blocks of keys begin would, and stays as it is. Sizes are
those that Triton's compiler finds. On Hopper, whose matrix instructions read from shared memory,
kernels for 16-bit formats take two blocks more; heads of up to 256 leave room for them.
"""

import functools
import logging

import torch
from torch import Tensor

from verl.utils.environment import triton_is_interpreted
from verl.utils.import_utils import is_available

logger = logging.getLogger(__name__)

OLDEST = (8, 0)
"""Compute capability. What is older has too little shared memory for the backward kernels, and no
matrix instructions for bf16."""

CONSEQUENCE = (
    "so fused GPU operations are off and plain torch is used; "
    "results agree to rounding, at lower speed"
)


def can_run_triton(device: torch.device | str) -> bool:
    """True on CUDA with triton installed and a GPU that is recent enough, and on a CPU while triton
    interprets its kernels."""
    device = torch.device(device)
    if device.type == "cuda":
        return _has_triton_for_cuda() and _is_recent(device)
    return device.type == "cpu" and triton_is_interpreted() and is_available("triton")


@functools.cache
def can_start_early(device: torch.device) -> bool:
    """Whether a kernel may begin beside the last programs of the one before (Hopper and later)."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def _has_triton_for_cuda() -> bool:
    if torch.version.hip is not None:
        logger.warning(
            "our Triton kernels are for NVIDIA's GPUs and this is AMD's, %s", CONSEQUENCE
        )
        return False
    if is_available("triton"):
        return True
    logger.warning("triton is not installed, %s: pip install triton", CONSEQUENCE)
    return False


@functools.cache
def _is_recent(device: torch.device) -> bool:
    name = torch.cuda.get_device_name(device)
    return is_recent_capability(name, torch.cuda.get_device_capability(device))


@functools.cache
def is_recent_capability(name: str, capability: tuple[int, int]) -> bool:
    """Whether such a GPU has what the kernels need; a lack is logged once per kind."""
    if capability >= OLDEST:
        return True
    logger.warning(
        "%s has compute capability %d.%d and our Triton kernels need %d.%d or newer, %s",
        name, *capability, *OLDEST, CONSEQUENCE,
    )  # fmt: skip
    return False


LARGE = 160 << 10
"""Bytes that wide heads take when several blocks of keys are on their way."""

FEWEST_ROWS = 16
"""Queries that a matrix instruction takes at least, and dimensions."""


@functools.cache
def shared_memory_bytes(device: torch.device) -> int | None:
    """Shared memory that a program may have; None where it does not matter.

    227 KB on Hopper, 163 KB on an A100, 99 KB on most others from Ampere on.
    """
    if device.type != "cuda":
        return None
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def has_large_shared_memory(device: torch.device) -> bool:
    """Whether a program may have as much of it as on an A100 or later data-centre GPUs."""
    limit = shared_memory_bytes(device)
    return limit is None or limit >= LARGE


def stages_that_fit(
    num_stages: int, query: Tensor, num_rows: int, *, num_keys: int, is_paged: bool = False
) -> int:
    """At most `num_stages`, for programs of `num_rows` of the queries (..., D).

    They go over blocks of `num_keys` keys and values, which are at most as wide as the queries.
    """
    limit = shared_memory_bytes(query.device)
    if limit is None:
        return num_stages
    fitting = (
        stages
        for stages in range(num_stages, 1, -1)
        if attention_bytes(query, num_rows, stages, num_keys=num_keys, is_paged=is_paged) <= limit
    )
    return next(fitting, 1)


def rows_that_fit(num_rows: int, query: Tensor, *, num_keys: int) -> int:
    """At most `num_rows`, a power of 2: queries of a program that has one stage or more."""
    limit = shared_memory_bytes(query.device)
    if limit is None:
        return num_rows
    while num_rows > FEWEST_ROWS and attention_bytes(query, num_rows, 1, num_keys=num_keys) > limit:
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

"""Whether our Triton kernels can run on a device.

Where they cannot, callers use plain torch. On a GPU without the triton package that is slower and
takes more memory, so it is said once.
"""

import functools
import logging

import torch

from verl.utils.environment import triton_is_interpreted
from verl.utils.import_utils import is_available

logger = logging.getLogger(__name__)

LARGE = 160 << 10
"""Bytes of shared memory that wide heads take when several blocks of keys are on their way."""


def can_run_triton(device: torch.device | str) -> bool:
    """True on CUDA with triton installed, and on a CPU while triton interprets its kernels."""
    kind = torch.device(device).type
    if kind == "cuda":
        return _has_triton_for_cuda()
    return kind == "cpu" and triton_is_interpreted() and is_available("triton")


@functools.cache
def can_start_early(device: torch.device) -> bool:
    """Whether a kernel may begin beside the last programs of the one before (Hopper and later)."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def has_large_shared_memory(device: torch.device) -> bool:
    """Whether a program may have as much of it as on an A100 or later data-centre GPUs.

    Others have about 100 KB, and a kernel that asks for more is not launched.
    """
    if device.type != "cuda":
        return True
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin >= LARGE


@functools.cache
def _has_triton_for_cuda() -> bool:
    if is_available("triton"):
        return True
    logger.warning(
        "triton is not installed, so fused GPU operations are off and plain torch is used; "
        "results agree to rounding, at lower speed: pip install triton"
    )
    return False

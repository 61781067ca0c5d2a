"""Whether our Triton kernels can run on a device.

Where they cannot, callers use plain torch. On a GPU that is slower and takes more memory, so the
reason is said once: the triton package is absent, the GPU is older than the kernels, or AMD's.
"""

import functools
import logging

import torch

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
    """Whether such a GPU has what the kernels need; that it has not is said once per kind."""
    if capability >= OLDEST:
        return True
    logger.warning(
        "%s has compute capability %d.%d and our Triton kernels need %d.%d or newer, %s",
        name, *capability, *OLDEST, CONSEQUENCE,
    )  # fmt: skip
    return False

"""Kernels that give the same bits every time."""

import torch

from verl.utils.environment import is_set, set_variable


def use_deterministic_kernels() -> None:
    """For the whole process, from now on. What has no such kernel is refused by torch, by name."""
    if not is_set("CUBLAS_WORKSPACE_CONFIG"):
        set_variable("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or torch refuses products
    torch.use_deterministic_algorithms(True)
    # A help for finding reads of what nobody has written; it slows everything down.
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010 - untyped

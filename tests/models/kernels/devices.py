"""Where a kernel test runs: on a CPU through Triton's interpreter, and compiled on a GPU.

Triton decides at import whether it interprets, so the first needs a process of its own:
`TRITON_INTERPRET=1 pytest tests/models/kernels`.
"""

import pytest
import torch

from verl.models.kernels.availability import can_run_triton

INTERPRETED = [
    pytest.mark.skipif(not can_run_triton("cpu"), reason="needs triton and TRITON_INTERPRET=1"),
    # The interpreter computes with numpy, which warns where a GPU gives inf or NaN in silence.
    pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero):RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
]

on_each_device = pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=INTERPRETED), pytest.param("cuda", marks=pytest.mark.gpu)],
)

on_each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Of the largest element; Triton's interpreter cuts bf16 off instead of rounding it."""


def random(*shape, dtype=torch.float32, device="cpu", seed=0):
    """The same numbers on every device; a leaf that collects gradients."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()


def assert_close(actual, expected):
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    difference = (actual.float() - expected.float()).abs().max()
    assert difference <= TOLERANCE[actual.dtype] * expected.float().abs().max()


def assert_same_results_and_gradients(actual, expected, leaves):
    """Compare tensors (or tuples of them) and what a random loss on them gives the leaves."""
    actual, expected = (x if isinstance(x, tuple) else (x,) for x in (actual, expected))
    pull = [random(*x.shape, device=x.device, seed=9).detach() for x in expected]
    gradients = []
    for outputs in (actual, expected):
        loss = sum((x.float() * p).sum() for x, p in zip(outputs, pull, strict=True))
        gradients.append(torch.autograd.grad(loss, leaves))
    for ours, theirs in zip(actual, expected, strict=True):
        assert_close(ours, theirs)
    for ours, theirs in zip(*gradients, strict=True):
        assert_close(ours, theirs)

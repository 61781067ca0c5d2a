"""Rows that are picked several times get the sum of their gradients, always the same."""

import pytest
import torch

from verl.models.head import gather_rows

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(6, 4), (6, 2, 3)])
def test_rows_and_gradients_are_those_of_indexing(device, shape):
    rows = torch.randn(shape, device=device, requires_grad=True)
    indices = torch.tensor([5, 0, 5, 5, 2], device=device)
    weights = torch.randn(5, *shape[1:], device=device)
    picked = gather_rows(rows, indices)
    (found,) = torch.autograd.grad((picked * weights).sum(), rows)
    expected = torch.zeros(shape, device=device)
    for index, weight in zip(indices.tolist(), weights, strict=True):
        expected[index] += weight
    assert torch.equal(picked, rows[indices])
    torch.testing.assert_close(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(64, 896), (64, 14, 64)])
def test_gradients_have_the_same_bits_every_time(shape):
    rows = torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    indices = torch.arange(8192, device="cuda") % 64
    gradient = torch.randn(8192, *shape[1:], device="cuda", dtype=torch.bfloat16)
    found = [torch.autograd.grad(gather_rows(rows, indices), rows, gradient)[0] for _ in range(5)]
    assert all(torch.equal(other, found[0]) for other in found)

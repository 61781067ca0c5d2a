"""Grouped products and sums of rows: the kernels against plain torch."""

import pytest
import torch

from tests.models.kernels.devices import (
    INTERPRETED,
    assert_close,
    on_each_device,
    on_each_dtype,
    random,
)
from verl.models.experts import reference_outer, reference_product, reference_sum_rows

PRODUCTS = pytest.mark.parametrize(
    ("device", "dtype"),
    [
        pytest.param("cpu", torch.float32, marks=INTERPRETED),
        # Not bf16 on a CPU, whose bits the interpreter multiplies as integers.
        pytest.param("cuda", torch.float32, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
    ],
)
COUNTS = [0, 70, 1, 0, 64, 9, 0]


def ends_of(counts, device):
    return torch.tensor(counts, device=device).cumsum(0).int()


@PRODUCTS
@pytest.mark.parametrize(("inner", "width", "is_transposed"), [(33, 17, False), (80, 130, True)])
def test_a_row_meets_the_weight_of_its_group(device, dtype, inner, width, is_transposed):
    from verl.models.kernels.grouped import grouped_product

    ends = ends_of(COUNTS, device)
    x = random(sum(COUNTS), inner, dtype=dtype, device=device).detach()
    shape = (len(COUNTS), width, inner) if is_transposed else (len(COUNTS), inner, width)
    weight = random(*shape, dtype=dtype, device=device, seed=1).detach()
    weight = weight.transpose(1, 2) if is_transposed else weight
    assert_close(grouped_product(x, weight, ends), reference_product(x, weight, ends))


@PRODUCTS
def test_the_outer_products_of_each_group_are_summed(device, dtype):
    from verl.models.kernels.grouped import grouped_outer

    ends = ends_of(COUNTS, device)
    left, right = (
        random(sum(COUNTS), n, dtype=dtype, device=device, seed=n).detach() for n in (33, 150)
    )
    expected = reference_outer(left, right, ends, dtype)
    assert_close(grouped_outer(left, right, ends, dtype), expected)
    assert not expected[0].any(), "a group without rows has no gradient"


@on_each_device
def test_a_row_has_the_same_bits_beside_any_others(device):
    from verl.models.kernels.grouped import grouped_product

    x = random(200, 96, device=device).detach()
    weight = random(3, 96, 40, device=device, seed=1).detach()
    whole = grouped_product(x, weight, ends_of([100, 90, 10], device))
    alone = grouped_product(x[100:103], weight, ends_of([0, 3, 0], device))
    assert torch.equal(whole[100:103], alone)


@on_each_device
@on_each_dtype
@pytest.mark.parametrize("width", [7, 1500])
def test_rows_are_summed_per_token_with_gradients(device, dtype, width):
    from verl.models.kernels.grouped import sum_rows, sum_rows_backward

    positions = torch.randperm(12, generator=torch.Generator().manual_seed(2)).view(4, 3).to(device)
    rows = random(12, width, dtype=dtype, device=device)
    weights = random(4, 3, device=device, seed=1)
    expected = reference_sum_rows(rows, weights, positions)
    assert_close(sum_rows(rows, weights, positions), expected)
    assert_close(sum_rows(rows, None, positions), reference_sum_rows(rows, None, positions))
    grad = random(4, width, dtype=dtype, device=device, seed=5).detach()
    actual = sum_rows_backward(grad, rows.detach(), weights.detach(), positions)
    for ours, theirs in zip(
        actual, torch.autograd.grad(expected, [rows, weights], grad), strict=True
    ):
        assert_close(ours, theirs)

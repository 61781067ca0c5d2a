import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl.utils.torch_functional import masked_mean, masked_sum, masked_var, masked_whiten

VALUES = torch.tensor([[1.0, 2.0, 99.0], [6.0, float("nan"), 3.0]])
MASK = torch.tensor([[1, 1, 0], [1, 0, 1]])  # keeps 1, 2, 6, 3


def test_only_kept_values_are_summed_and_averaged():
    assert masked_sum(VALUES, MASK) == 12
    assert masked_mean(VALUES, MASK) == 3
    assert masked_sum(VALUES, MASK, axis=-1).tolist() == [3, 9]
    assert masked_mean(VALUES, MASK, axis=-1).tolist() == [1.5, 4.5]
    assert masked_mean(VALUES, MASK.bool(), axis=0).tolist() == [3.5, 2, 3]


def test_an_empty_mask_has_mean_zero():
    assert masked_mean(VALUES, torch.zeros_like(MASK)) == 0


def test_variance_divides_by_one_less_than_the_count():
    # deviations from 3: -2, -1, 3, 0; squares sum to 14
    assert masked_var(VALUES, MASK).item() == pytest.approx(14 / 3)
    assert masked_var(VALUES, MASK, unbiased=False).item() == pytest.approx(14 / 4)


@pytest.mark.parametrize("num_kept", [0, 1])
def test_fewer_than_two_values_have_no_variance(num_kept):
    mask = torch.zeros(3)
    mask[:num_kept] = 1
    assert masked_var(torch.tensor([5.0, 1.0, 2.0]), mask) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_single_value_whitens_to_zero(dtype):
    values, mask = torch.tensor([5.0, 1.0], dtype=dtype), torch.tensor([1, 0], dtype=dtype)
    assert masked_whiten(values, mask)[0] == 0
    assert masked_whiten(values, mask, shift_mean=False)[0].item() == pytest.approx(5.0)


def test_whitening_by_hand():
    values, mask = torch.tensor([1.0, 3.0, 100.0]), torch.tensor([1, 1, 0])
    half = 1 / 2**0.5  # mean 2, variance 2
    assert masked_whiten(values, mask)[:2].tolist() == pytest.approx([-half, half])
    kept = masked_whiten(values, mask, shift_mean=False)[:2]
    assert kept.tolist() == pytest.approx([2 - half, 2 + half])


@given(st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=20), st.integers(0, 5))
def test_whitening_matches_torch_on_the_kept_values(kept, num_masked):
    values = torch.tensor(kept + [float("inf")] * num_masked)
    mask = torch.tensor([1.0] * len(kept) + [0.0] * num_masked)
    plain = torch.tensor(kept)
    expected = (plain - plain.mean()) * torch.rsqrt(plain.var() + 1e-8)
    torch.testing.assert_close(
        masked_whiten(values, mask)[: len(kept)], expected, rtol=1e-3, atol=1e-2
    )


def test_a_nan_outside_the_mask_does_not_reach_the_gradient():
    values = VALUES.clone().requires_grad_()
    masked_mean(values, MASK).backward()
    assert values.grad is not None
    assert values.grad.tolist() == [[0.25, 0.25, 0.0], [0.25, 0.0, 0.25]]

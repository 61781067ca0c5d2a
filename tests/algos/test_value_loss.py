"""The critic's loss against numbers worked by hand."""

import pytest
import torch

from verl.algos.value_loss import compute_value_loss


def test_the_step_is_clipped_around_the_old_values():
    vpreds = torch.tensor([[1.0, 0.2, 0.0]], requires_grad=True)
    returns = torch.tensor([[2.0, 1.0, -1.0]])
    values = torch.tensor([[0.0, 0.0, 0.0]])  # before the update
    loss, clipfrac = compute_value_loss(vpreds, returns, values, torch.ones(1, 3), 0.5)
    # Token 1: v = 1 is clipped to 0.5, (0.5 - 2)^2 = 2.25 > (1 - 2)^2 = 1.
    # Tokens 2 and 3 are within reach: 0.64 and 1.
    assert loss.item() == pytest.approx(0.5 * (2.25 + 0.64 + 1.0) / 3)
    assert clipfrac.item() == pytest.approx(1 / 3)
    loss.backward()
    # A clipped token does not pull any further; the others by (v - R) / 3.
    assert vpreds.grad[0].tolist() == pytest.approx([0.0, -0.8 / 3, 1.0 / 3])


def test_the_clip_does_not_help_a_prediction_that_went_the_wrong_way():
    # v moved from 0 to -1 while the return is 1: the unclipped error is larger, so it counts.
    vpreds = torch.tensor([[-1.0]], requires_grad=True)
    loss, clipfrac = compute_value_loss(
        vpreds, torch.tensor([[1.0]]), torch.tensor([[0.0]]), torch.ones(1, 1), 0.5
    )
    assert loss.item() == pytest.approx(0.5 * 4.0)
    assert clipfrac.item() == 0.0
    loss.backward()
    assert vpreds.grad.item() == pytest.approx(-2.0)


def test_moving_both_values_and_old_values_keeps_the_clip():
    args = torch.tensor([[3.0]]), torch.tensor([[5.0]])
    near, _ = compute_value_loss(
        *args, values=torch.tensor([[3.2]]), response_mask=torch.ones(1, 1), cliprange_value=0.5
    )
    far, _ = compute_value_loss(
        *args, values=torch.tensor([[0.0]]), response_mask=torch.ones(1, 1), cliprange_value=0.5
    )
    assert near.item() == pytest.approx(2.0)
    assert far.item() == pytest.approx(0.5 * 4.5**2)


def test_masked_tokens_count_neither_in_the_loss_nor_in_the_fraction():
    vpreds = torch.tensor([[1.0, float("nan")], [50.0, 0.0]])
    mask = torch.tensor([[1, 0], [0, 0]])
    loss, clipfrac = compute_value_loss(vpreds, torch.zeros(2, 2), torch.zeros(2, 2), mask, 2.0)
    assert loss.item() == pytest.approx(0.5)
    assert clipfrac.item() == 0.0


def test_global_counts_reach_the_aggregation():
    ones = torch.ones(2, 2)
    loss, _ = compute_value_loss(
        ones, ones * 0, ones, ones, 0.5, "token-mean", dp_size=2, batch_num_tokens=16
    )
    assert loss.item() == pytest.approx(0.5 * 4 / 16 * 2)
    by_sequence, _ = compute_value_loss(ones, ones * 0, ones, ones, 0.5, "seq-mean-token-sum")
    assert by_sequence.item() == pytest.approx(0.5 * 2)

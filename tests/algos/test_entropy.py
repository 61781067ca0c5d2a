"""The entropy term against numbers worked by hand."""

import math

import pytest
import torch

from verl.algos.entropy import compute_entropy_loss


def test_a_uniform_policy_over_four_tokens_has_entropy_log_four():
    loss = compute_entropy_loss(torch.zeros(2, 3, 4), torch.ones(2, 3))
    assert loss.item() == pytest.approx(math.log(4))


def test_only_kept_tokens_count_and_the_mode_decides_how():
    logits = torch.zeros(2, 2, 2)
    logits[0, 1] = torch.tensor([0.0, -1e9])  # certain: entropy 0
    mask = torch.tensor([[1, 1], [1, 0]])
    log_2 = math.log(2)
    assert compute_entropy_loss(logits, mask).item() == pytest.approx(2 * log_2 / 3)
    by_sequence = compute_entropy_loss(logits, mask, "seq-mean-token-mean")
    assert by_sequence.item() == pytest.approx((log_2 / 2 + log_2) / 2)
    of_a_part = compute_entropy_loss(logits, mask, "token-mean", dp_size=2, batch_num_tokens=10)
    assert of_a_part.item() == pytest.approx(2 * log_2 / 10 * 2)


def test_ascending_the_entropy_flattens_the_policy():
    logits = torch.tensor([[[1.0, 0.0]]], requires_grad=True)
    compute_entropy_loss(logits, torch.ones(1, 1)).backward()
    assert logits.grad[0, 0, 0] < 0 < logits.grad[0, 0, 1]

"""Generalized advantage estimation against numbers worked by hand (gamma 0.9, lambda 0.8)."""

import statistics
import time

import pytest
import torch

from verl.algos.advantages import compute_gae_advantage_return

REWARDS = torch.tensor([[0.0, 0.0, 1.0]])
VALUES = torch.tensor([[0.5, 0.6, 0.7]])


def whitened(values):
    mean, std = statistics.mean(values), statistics.stdev(values)
    return [(value - mean) / std for value in values]


def gae(rewards, values, mask, gamma=0.9, lam=0.8):
    return compute_gae_advantage_return(
        token_level_rewards=rewards, values=values, response_mask=mask, gamma=gamma, lam=lam
    )


def test_values_of_the_next_token_bootstrap_and_the_last_token_does_not():
    # delta = 0.9 * 0.6 - 0.5, 0.9 * 0.7 - 0.6, 1 - 0.7 = 0.04, 0.03, 0.3
    # A     = 0.04 + 0.72 * 0.246, 0.03 + 0.72 * 0.3, 0.3
    raw = [0.21712, 0.246, 0.3]
    advantages, returns = gae(REWARDS, VALUES, torch.ones(1, 3))
    assert returns[0].tolist() == pytest.approx([0.71712, 0.846, 1.0])
    assert advantages[0].tolist() == pytest.approx(whitened(raw), abs=1e-4)


def test_a_masked_token_is_stepped_over():
    # The first token sees the value and the advantage of the third: delta = 0.9 * 0.7 - 0.5 = 0.13,
    # A = 0.13 + 0.72 * 0.3 = 0.346.
    advantages, returns = gae(REWARDS, VALUES, torch.tensor([[1, 0, 1]]))
    assert returns[0].tolist() == pytest.approx([0.846, 0.0, 1.0])
    expected = whitened([0.346, 0.3])
    assert advantages[0].tolist() == pytest.approx([expected[0], 0.0, expected[1]], abs=1e-3)


def test_masked_values_have_no_influence():
    mask = torch.tensor([[1, 0, 1], [1, 1, 0]])
    rewards, values = REWARDS.repeat(2, 1) * mask, VALUES.repeat(2, 1)
    poisoned = torch.where(mask.bool(), values, float("nan"))
    for clean, dirty in zip(gae(rewards, values, mask), gae(rewards, poisoned, mask), strict=True):
        assert torch.equal(clean, dirty)


def test_a_reward_on_trailing_tool_output_goes_to_the_action_before_it():
    # Tokens: action, action, tool, tool. The score sits on the last tool token.
    mask = torch.tensor([[1, 1, 0, 0]])
    values = torch.tensor([[0.5, 0.6, 9.0, 9.0]])
    _, at_the_end = gae(torch.tensor([[0.0, 0.0, 0.0, 1.0]]), values, mask)
    _, at_the_action = gae(torch.tensor([[0.0, 1.0, 0.0, 0.0]]), values, mask)
    assert torch.equal(at_the_end, at_the_action)
    assert at_the_end[0].tolist() == pytest.approx([0.5 + 0.04 + 0.72 * 0.4, 1.0, 0.0, 0.0])


def test_without_discount_the_return_is_the_reward_to_come_whatever_the_values():
    rewards = torch.tensor([[1.0, 0.0, 2.0, 0.0], [0.0, 3.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
    _, returns = gae(rewards, torch.randn(2, 4), mask, gamma=1.0, lam=1.0)
    expected = torch.tensor([[3.0, 2.0, 2.0, 0.0], [3.0, 3.0, 0.0, 0.0]])
    torch.testing.assert_close(returns, expected)


def test_with_lambda_zero_the_return_is_the_one_step_target():
    _, returns = gae(REWARDS, VALUES, torch.ones(1, 3), lam=0.0)
    assert returns[0].tolist() == pytest.approx([0.9 * 0.6, 0.9 * 0.7, 1.0])


def test_rows_do_not_see_each_other_before_whitening():
    mask = torch.tensor([[1, 1, 1], [1, 0, 1]])
    _, returns = gae(REWARDS.repeat(2, 1), VALUES.repeat(2, 1), mask)
    assert returns[0].tolist() == pytest.approx([0.71712, 0.846, 1.0])
    assert returns[1].tolist() == pytest.approx([0.846, 0.0, 1.0])


def test_values_in_half_precision_are_computed_in_the_precision_of_the_rewards():
    advantages, returns = gae(REWARDS, VALUES.bfloat16(), torch.ones(1, 3))
    assert advantages.dtype == returns.dtype == torch.float32


def test_a_batch_of_long_responses_takes_less_than_five_seconds_of_cpu_time():
    shape = (256, 4096)
    start = time.thread_time()
    gae(torch.zeros(shape), torch.randn(shape), torch.ones(shape))
    assert time.thread_time() - start < 5

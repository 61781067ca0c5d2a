"""REINFORCE++ and ReMax against numbers worked by hand."""

import statistics

import numpy as np
import pytest
import torch

from verl.algos.advantages import (
    compute_reinforce_plus_plus_baseline_outcome_advantage,
    compute_reinforce_plus_plus_outcome_advantage,
    compute_remax_outcome_advantage,
)
from verl.config.algorithm import AlgoConfig


def whitened(values):
    mean, std = statistics.mean(values), statistics.stdev(values)
    return [(value - mean) / std for value in values]


def test_reinforce_plus_plus_discounts_the_reward_to_come_and_whitens():
    rewards = torch.tensor([[0.0, 0.0, 4.0], [2.0, 2.0, 0.0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    advantages, returns = compute_reinforce_plus_plus_outcome_advantage(
        rewards, mask, config=AlgoConfig(gamma=0.5)
    )
    assert returns.tolist() == [[1.0, 2.0, 4.0], [3.0, 2.0, 0.0]]
    expected = whitened([1.0, 2.0, 4.0, 3.0, 2.0])
    assert advantages[mask.bool()].tolist() == pytest.approx(expected, abs=1e-5)
    assert advantages[1, 2] == 0


def test_returns_cross_tool_output_without_being_discounted_by_it():
    rewards = torch.tensor([[0.0, 0.0, 0.0, 4.0]])
    mask = torch.tensor([[1, 0, 0, 1]])
    _, returns = compute_reinforce_plus_plus_outcome_advantage(rewards, mask, gamma=0.5)
    assert returns.tolist() == [[2.0, 0.0, 0.0, 4.0]]


def test_a_reward_on_trailing_tool_output_is_not_lost():
    rewards = torch.tensor([[0.0, 0.0, 4.0]])
    mask = torch.tensor([[1, 1, 0]])
    _, returns = compute_reinforce_plus_plus_outcome_advantage(rewards, mask, gamma=0.5)
    assert returns.tolist() == [[2.0, 4.0, 0.0]]


def test_the_config_decides_the_discount():
    rewards, mask = torch.tensor([[0.0, 4.0]]), torch.ones(1, 2)
    _, returns = compute_reinforce_plus_plus_outcome_advantage(
        rewards, mask, config=AlgoConfig(gamma=0.5), gamma=0.9
    )
    assert returns.tolist() == [[2.0, 4.0]]


def test_one_trained_token_in_the_whole_batch_whitens_to_zero():
    advantages, returns = compute_reinforce_plus_plus_outcome_advantage(
        torch.tensor([[3.0, 0.0]]), torch.tensor([[1, 0]])
    )
    assert advantages.tolist() == [[0.0, 0.0]]
    assert returns.tolist() == [[3.0, 0.0]]


def test_equal_returns_whiten_to_exactly_zero():
    rewards = torch.zeros(7, 3)
    rewards[:, -1] = 0.1
    advantages, _ = compute_reinforce_plus_plus_outcome_advantage(rewards, torch.ones(7, 3))
    assert not advantages.any()


def test_the_baseline_form_centres_by_group_and_whitens_over_tokens():
    # Groups: 1, 3 (mean 2) and 0, 4 (mean 2); lengths 2, 1, 1, 1: tokens -1, -1, 1, -2, 2.
    rewards = torch.tensor([[0.0, 1.0], [3.0, 0.0], [0.0, 0.0], [4.0, 0.0]])
    mask = torch.tensor([[1, 1], [1, 0], [1, 0], [1, 0]])
    advantages, returns = compute_reinforce_plus_plus_baseline_outcome_advantage(
        rewards, mask, np.array(["a", "a", "b", "b"])
    )
    expected = whitened([-1.0, -1.0, 1.0, -2.0, 2.0])
    assert advantages[mask.bool()].tolist() == pytest.approx(expected, abs=1e-5)
    assert torch.equal(advantages, returns)


def test_remax_subtracts_the_greedy_reward_from_the_reward_to_come():
    rewards = torch.tensor([[0.5, 0.0, 1.0], [0.0, 2.0, 0.0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    advantages, returns = compute_remax_outcome_advantage(rewards, torch.tensor([1.0, 0.5]), mask)
    assert returns.tolist() == [[1.5, 1.0, 1.0], [2.0, 2.0, 0.0]]
    assert advantages.tolist() == [[0.5, 0.0, 0.0], [1.5, 1.5, 0.0]]


def test_remax_refuses_a_baseline_that_is_no_number():
    with pytest.raises(ValueError, match=r"reward_baselines .*row 1\b"):
        compute_remax_outcome_advantage(
            torch.zeros(2, 1), torch.tensor([0.0, float("nan")]), torch.ones(2, 1)
        )

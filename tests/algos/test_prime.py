"""PRIME's numbers, worked by hand."""

import math

import numpy as np
import pytest
import torch

from verl.algos.prime import (
    PrimeWeights,
    implicit_loss,
    implicit_rewards,
    leave_one_out,
    on_last_token,
    pair_accuracy,
    prime_advantage,
    shaped_rewards,
)

GROUP = np.array(["a", "a", "a"])
MASK = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0]])
PROCESS = torch.tensor([[0.3, 0.0, 0.6], [0.2, 0.4, 0.0], [-0.6, 0.0, 0.0]], dtype=torch.float64)
OUTCOME = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)


def close(found, expected):
    torch.testing.assert_close(
        found, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12
    )


def test_a_token_is_rewarded_by_its_log_ratio_to_the_reference():
    log_probs = torch.tensor([[-1.0, -2.0, -9.0]], dtype=torch.float64)
    reference = torch.tensor([[-1.5, -1.0, -1.0]], dtype=torch.float64)
    rewards = implicit_rewards(log_probs, reference, torch.tensor([[1, 1, 0]]), beta=0.05)
    close(rewards, [[0.025, -0.05, 0.0]])


def test_the_loss_is_the_cross_entropy_of_the_outcome_and_counts_all_sequences_of_the_step():
    log_ratios = torch.tensor([[2.0, 1.0], [-1.0, 0.0], [5.0, 5.0]], dtype=torch.float64)
    loss = implicit_loss(
        log_ratios,
        torch.zeros_like(log_ratios),
        torch.tensor([[1, 1], [1, 0], [0, 0]]),  # the last row has no response
        torch.tensor([1.0, 0.25, 1.0]),
        beta=0.5,
        num_sequences=4,
    )
    right = 1 / (1 + math.exp(-1.5))
    other = 1 / (1 + math.exp(0.5))
    by_hand = -math.log(right) - 0.25 * math.log(other) - 0.75 * math.log(1 - other)
    assert abs(loss.item() - by_hand / 4) < 1e-12


def test_advantages_center_each_reward_by_the_other_responses_and_sum_to_the_end():
    advantages, returns = prime_advantage(PROCESS, OUTCOME, MASK, GROUP, PrimeWeights())
    # Means of the token rewards are 0.3, 0.3, -0.6: the others' are -0.15, -0.15 and 0.3.
    # Outcomes less the others' mean: 1, -0.5, -0.5. Both count five times.
    rewards = [[2.25, 0.75, 3.75 + 5.0], [1.75, 2.75 - 2.5, 0.0], [-4.5 - 2.5, 0.0, 0.0]]
    to_go = [[11.75, 9.5, 8.75], [2.0, 0.25, 0.0], [-7.0, 0.0, 0.0]]
    assert [sum(row) for row in rewards] == [row[0] for row in to_go]
    close(returns, to_go)
    kept = [11.75, 9.5, 8.75, 2.0, 0.25, -7.0]
    count = 6 + 1e-8  # as masked_mean divides
    mean = sum(kept) / count
    deviation = math.sqrt(sum((x - mean) ** 2 for x in kept) / count * 6 / 5 + 1e-8)
    white = [(x - mean) / deviation for x in kept]
    close(advantages, [white[:3], [*white[3:5], 0.0], [white[5], 0.0, 0.0]])


def test_verls_scaling_moves_token_rewards_alone():
    weights = PrimeWeights(process=1.0, outcome=0.0, is_scaled=True)
    _, returns = prime_advantage(PROCESS, OUTCOME, MASK, GROUP, weights)
    # r * 3/2 - (0.3 + 0.3 - 0.6) / 2, which is r * 3/2.
    close(returns, [[1.35, 0.9, 0.9], [0.9, 0.6, 0.0], [-0.9, 0.0, 0.0]])
    outcome_alone = [
        prime_advantage(PROCESS, OUTCOME, MASK, GROUP, PrimeWeights(process=0, is_scaled=scaled))[1]
        for scaled in (False, True)
    ]
    torch.testing.assert_close(*outcome_alone, rtol=0, atol=1e-12)


def test_verls_scaling_of_two_and_of_one():
    # 0.3 * 2 - (0.3 + 0.1) is twice 0.3 less the other's 0.1.
    means = torch.tensor([0.3, 0.1, 0.5], dtype=torch.float64)
    factor, baseline = leave_one_out(means, torch.tensor([0, 0, 1]), is_scaled=True)
    close(factor, [2.0, 2.0, 1.0])
    close(baseline, [0.4, 0.4, 0.0])


def test_groups_do_not_touch_each_other_and_a_single_response_keeps_its_rewards():
    index = np.array(["a", "b", "a"])
    for scaled in (False, True):
        weights = PrimeWeights(process=1.0, outcome=2.0, is_scaled=scaled)
        _, returns = prime_advantage(PROCESS, OUTCOME, MASK, index, weights)
        close(returns[1], [0.6, 0.4, 0.0])


def test_token_rewards_can_be_joined_and_scaled_to_the_largest_reward_to_go():
    whole = shaped_rewards(PROCESS, MASK, granularity="whole", norm="none")
    close(whole, [[0.0, 0.0, 0.9], [0.0, 0.6, 0.0], [-0.6, 0.0, 0.0]])
    scaled = shaped_rewards(PROCESS, MASK, granularity="token", norm="batch_norm")
    close(scaled, (PROCESS / (0.9 + 1e-6)).tolist())


def test_the_last_token_is_the_last_of_the_mask():
    mask = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0]])
    assert on_last_token(torch.tensor([2.0, 3.0]), mask).tolist() == [[0, 0, 2, 0], [0, 0, 0, 0]]


def test_pairs_count_by_how_far_their_outcomes_differ():
    logits, accuracy = torch.tensor([1.0, 0.0, 1.0, 9.0]), torch.tensor([1.0, 0.5, 0.0, 0.0])
    index = np.array(["a", "a", "a", "b"])
    # (0, 1) right with 0.5, (0, 2) a tie with 1, (1, 2) wrong with 0.5.
    assert pair_accuracy(logits, accuracy, index) == pytest.approx(0.5)
    assert math.isnan(pair_accuracy(logits, torch.ones(4), index))

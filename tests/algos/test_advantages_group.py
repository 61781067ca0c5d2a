"""GRPO, pass@k, RLOO, OPO and GPG against numbers worked by hand."""

import math
from collections import defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from tests.algos.advantage_cases import cases
from verl.algos.advantages import (
    compute_gpg_outcome_advantage,
    compute_grpo_outcome_advantage,
    compute_grpo_passk_outcome_advantage,
    compute_grpo_vectorized_outcome_advantage,
    compute_opo_outcome_advantage,
    compute_rloo_outcome_advantage,
    compute_rloo_vectorized_outcome_advantage,
)
from verl.config.algorithm import AlgoConfig

# Two prompts: rewards 1, 3, 5 (mean 3, sample std 2) and 0, 1 (mean 1/2, sample std sqrt(1/2)).
REWARDS = torch.tensor([[0.0, 1.0], [0.0, 3.0], [0.0, 5.0], [0.0, 0.0], [0.0, 1.0]])
INDEX = np.array(["a", "a", "a", "b", "b"], dtype=object)
ONES = torch.ones(5, 2)


def first_token(result):
    advantages, returns = result
    assert torch.equal(advantages, returns)
    return advantages[:, 0].tolist()


@pytest.mark.parametrize(
    "grpo", [compute_grpo_outcome_advantage, compute_grpo_vectorized_outcome_advantage]
)
def test_grpo_divides_by_the_sample_standard_deviation_of_the_group(grpo):
    half = 0.5 / (math.sqrt(0.5) + 1e-6)
    expected = [-2 / 2.000001, 0.0, 2 / 2.000001, -half, half]
    assert first_token(grpo(REWARDS, ONES, INDEX)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    "grpo", [compute_grpo_outcome_advantage, compute_grpo_vectorized_outcome_advantage]
)
def test_dr_grpo_does_not_divide(grpo):
    result = grpo(REWARDS, ONES, INDEX, norm_adv_by_std_in_grpo=False)
    assert first_token(result) == [-2.0, 0.0, 2.0, -0.5, 0.5]


def test_epsilon_is_added_to_the_standard_deviation_not_to_the_variance():
    result = compute_grpo_outcome_advantage(REWARDS[:3], ONES[:3], INDEX[:3], epsilon=2.0)
    assert first_token(result) == [-0.5, 0.0, 0.5]  # 2 / (2 + 2)


def test_grpo_lets_the_reward_of_a_group_of_one_pass():
    result = compute_grpo_outcome_advantage(REWARDS[2:4], ONES[:2], np.array(["a", "b"]))
    assert first_token(result) == pytest.approx([5 / 1.000001, 0.0])


def test_groups_are_told_apart_by_label_not_by_neighbourhood():
    index = np.array(["a", "b", "a", "b", "a"], dtype=object)  # rewards 1, 5, 1 and 3, 0
    result = compute_grpo_outcome_advantage(REWARDS, ONES, index, norm_adv_by_std_in_grpo=False)
    expected = [1 - 7 / 3, 1.5, 5 - 7 / 3, -1.5, 1 - 7 / 3]
    assert first_token(result) == pytest.approx(expected)


def test_the_advantage_is_laid_over_trained_tokens_only():
    mask = torch.tensor([[1, 0], [0, 1], [1, 1], [0, 0], [1, 0]])
    advantages, _ = compute_grpo_outcome_advantage(
        REWARDS, mask, INDEX, norm_adv_by_std_in_grpo=False
    )
    expected = [[-2.0, 0.0], [0.0, 0.0], [2.0, 2.0], [0.0, 0.0], [0.5, 0.0]]
    assert advantages.tolist() == expected


def test_a_reward_counts_even_where_it_sits_on_a_masked_token():
    mask = torch.tensor([[1, 0]] * 5)  # rewards are on the second token
    result = compute_grpo_outcome_advantage(REWARDS, mask, INDEX, norm_adv_by_std_in_grpo=False)
    assert first_token(result) == [-2.0, 0.0, 2.0, -0.5, 0.5]


def test_tiny_but_real_differences_are_kept():
    rewards = torch.tensor([[0.0], [1e-5], [0.0], [1e-5]], dtype=torch.float64)
    result = compute_grpo_outcome_advantage(rewards, torch.ones(4, 1), np.array([0, 0, 1, 1]))
    std = 1e-5 / math.sqrt(2)
    assert first_token(result)[1] == pytest.approx(0.5e-5 / (std + 1e-6))


def test_pass_at_k_credits_only_the_best_response_with_its_lead():
    result = compute_grpo_passk_outcome_advantage(REWARDS, ONES, INDEX)
    expected = [0.0, 0.0, 2 / 2.000001, 0.0, 1 / (math.sqrt(0.5) + 1e-6)]
    assert first_token(result) == pytest.approx(expected, rel=1e-6)


def test_pass_at_k_takes_the_normalisation_from_the_config():
    config = AlgoConfig(norm_adv_by_std_in_grpo=False)
    result = compute_grpo_passk_outcome_advantage(REWARDS, ONES, INDEX, config=config)
    assert first_token(result) == [0.0, 0.0, 2.0, 0.0, 1.0]


def test_pass_at_k_gives_nothing_when_two_responses_are_best():
    rewards = torch.tensor([[1.0], [1.0], [0.0]])
    result = compute_grpo_passk_outcome_advantage(rewards, torch.ones(3, 1), np.array([7, 7, 7]))
    assert first_token(result) == [0.0, 0.0, 0.0]


def test_pass_at_k_refuses_a_prompt_with_one_response_by_name():
    index = np.array(["a", "a", "a", "lonely", "a"], dtype=object)
    with pytest.raises(ValueError, match=r"row 3 \(uid 'lonely'\).*rollout.n"):
        compute_grpo_passk_outcome_advantage(REWARDS, ONES, index)


def test_rloo_subtracts_the_mean_of_the_others():
    result = compute_rloo_outcome_advantage(REWARDS, ONES, INDEX)
    assert first_token(result) == pytest.approx([1 - 4, 3 - 3, 5 - 2, 0 - 1, 1 - 0])


def test_the_two_forms_of_rloo_agree_but_for_a_response_without_peers():
    index = np.array(["a", "a", "a", "b", "c"], dtype=object)
    plain = first_token(compute_rloo_outcome_advantage(REWARDS, ONES, index))
    vectorized = first_token(compute_rloo_vectorized_outcome_advantage(REWARDS, ONES, index))
    assert plain[:3] == vectorized[:3]
    assert plain[4] == 1.0  # keeps its reward
    assert vectorized[4] == 0.0  # teaches nothing


def test_opo_weighs_the_baseline_by_length():
    # Rewards 1, 3, 5 with 2, 1, 1 trained tokens: baseline (2 + 3 + 5) / 4 = 2.5.
    mask = torch.tensor([[1, 1], [1, 0], [1, 0], [1, 1], [1, 1]])
    result = compute_opo_outcome_advantage(REWARDS, mask, INDEX)
    assert first_token(result) == [-1.5, 0.5, 2.5, -0.5, 0.5]


def test_opo_lets_the_reward_of_a_group_of_one_pass():
    result = compute_opo_outcome_advantage(REWARDS[2:3], ONES[:1], np.array(["a"]))
    assert first_token(result) == [5.0]


def test_gpg_scales_up_for_responses_without_reward():
    # 4 of 5 rewards are not zero: alpha = 5 / 4.
    result = compute_gpg_outcome_advantage(REWARDS, ONES, INDEX)
    assert first_token(result) == pytest.approx([-2.5, 0.0, 2.5, -0.625, 0.625])


def test_gpg_takes_a_norm_and_a_factor():
    result = compute_gpg_outcome_advantage(REWARDS, ONES, INDEX, f_norm=5.0, alpha=2.0)
    assert first_token(result) == pytest.approx([-1.0, 0.0, 1.0, -0.25, 0.25])


def test_gpg_without_any_reward_is_zero():
    result = compute_gpg_outcome_advantage(REWARDS * 0, ONES, INDEX)
    assert first_token(result) == [0.0] * 5


@settings(deadline=None, max_examples=50)
@given(case=cases())
def test_the_vectorised_forms_equal_a_loop_over_groups(case):
    rewards = case.token_level_rewards.sum(-1).tolist()
    lengths = case.response_mask.sum(-1).tolist()
    groups = defaultdict(list)
    for row, label in enumerate(case.index):
        groups[label].append(row)
    grpo, rloo, opo = [0.0] * len(rewards), [0.0] * len(rewards), [0.0] * len(rewards)
    for rows in groups.values():
        n, mean = len(rows), sum(rewards[row] for row in rows) / len(rows)
        std = math.sqrt(sum((rewards[row] - mean) ** 2 for row in rows) / (n - 1))
        tokens = sum(lengths[row] for row in rows)
        weighted = sum(lengths[row] * rewards[row] for row in rows) / max(tokens, 1)
        for row in rows:
            others = [rewards[other] for other in rows if other != row]
            grpo[row] = (rewards[row] - mean) / (std + 1e-6)
            rloo[row] = rewards[row] - sum(others) / len(others)
            opo[row] = rewards[row] - weighted
    batch = (case.token_level_rewards, torch.ones_like(case.response_mask), case.index)
    assert first_token(compute_grpo_outcome_advantage(*batch)) == pytest.approx(grpo, abs=1e-4)
    assert first_token(compute_rloo_outcome_advantage(*batch)) == pytest.approx(rloo, abs=1e-4)
    advantages, _ = compute_opo_outcome_advantage(
        case.token_level_rewards, case.response_mask, case.index
    )
    expected = torch.tensor(opo)[:, None] * case.response_mask
    torch.testing.assert_close(advantages, expected, atol=1e-4, rtol=1e-4)

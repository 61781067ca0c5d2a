"""The optimal token baseline against numbers worked by hand and against a plain loop."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.algos.advantage_cases import cases
from verl.algos.advantages import (
    compute_multi_turn_optimal_token_baseline_advantage,
    compute_optimal_token_baseline_advantage,
)

# With pi = 1/2 the noise of a token is 1 - 1 + sum(pi^2) = sum(pi^2).
HALF = math.log(0.5)
FLOATS = ("token_level_rewards", "old_log_probs", "sum_pi_squared")


def baseline_case(rewards, mask, noise):
    rewards, mask = torch.tensor(rewards), torch.tensor(mask)
    return {
        "token_level_rewards": rewards,
        "response_mask": mask,
        "index": np.array(["a"] * len(rewards), dtype=object),
        "old_log_probs": torch.full(mask.shape, HALF),
        "sum_pi_squared": torch.tensor(noise),
    }


def test_returns_are_averaged_with_the_gradient_noise_summed_so_far():
    case = baseline_case([[0.0, 1.0], [0.0, 0.0]], [[1, 1], [1, 1]], [[0.25, 0.25], [0.75, 0.25]])
    # W = (1/4, 1/2) and (3/4, 1): baseline 1/4 / 1 = 1/4 and 1/2 / 3/2 = 1/3.
    advantages, returns = compute_optimal_token_baseline_advantage(**case)
    torch.testing.assert_close(returns, torch.tensor([[1.0, 1.0], [0.0, 0.0]]))
    expected = torch.tensor([[3 / 4, 2 / 3], [-1 / 4, -1 / 3]])
    torch.testing.assert_close(advantages, expected, atol=1e-6, rtol=1e-6)


def test_importance_weights_enter_squared():
    case = baseline_case([[1.0], [0.0]], [[1], [1]], [[0.25], [0.25]])
    advantages, _ = compute_optimal_token_baseline_advantage(
        **case, rollout_is_weights=torch.tensor([[2.0], [1.0]])
    )
    torch.testing.assert_close(advantages, torch.tensor([[1 / 5], [-4 / 5]]))  # weights 4 : 1


def test_each_importance_weight_stays_with_its_token():
    case = baseline_case([[0.0, 1.0], [0.0, 0.0]], [[1, 1], [1, 1]], [[0.25, 0.25], [0.75, 0.25]])
    case = {k: v.double() if k in FLOATS else v for k, v in case.items()}
    case["old_log_probs"].fill_(HALF)
    rho = torch.tensor([[2.0, 1.0], [1.0, 3.0]], dtype=torch.float64)
    # W of the first response: 4/4 and 4/4 + 1/4 = 5/4; of the second: 3/4 and 3/4 + 9/4 = 3.
    # Baselines: 1 / (1 + 3/4) = 4/7 and (5/4) / (5/4 + 3) = 5/17.
    expected = torch.tensor([[3 / 7, 12 / 17], [-4 / 7, -5 / 17]], dtype=torch.float64)
    for function in (
        compute_optimal_token_baseline_advantage,
        compute_multi_turn_optimal_token_baseline_advantage,
    ):
        advantages, _ = function(**case, rollout_is_weights=rho, epsilon=0.0)
        torch.testing.assert_close(advantages, expected, atol=1e-12, rtol=0)


def test_a_certain_policy_is_averaged_without_weights():
    case = baseline_case([[1.0], [0.0]], [[1], [1]], [[1.0], [1.0]])
    case["old_log_probs"] = torch.zeros(2, 1)  # pi = 1: no noise at all
    advantages, _ = compute_optimal_token_baseline_advantage(**case)
    assert advantages.tolist() == [[0.5], [-0.5]]


def test_a_single_response_keeps_its_return():
    case = baseline_case([[0.0, 2.0]], [[1, 1]], [[0.25, 0.25]])
    for function in (
        compute_optimal_token_baseline_advantage,
        compute_multi_turn_optimal_token_baseline_advantage,
    ):
        assert function(**case)[0].tolist() == [[2.0, 2.0]]


def test_past_its_last_peer_the_longest_response_gets_zero_or_its_return():
    case = baseline_case(
        [[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]], [[1, 1, 1], [1, 0, 0]], [[0.25] * 3, [0.25] * 3]
    )
    without, _ = compute_optimal_token_baseline_advantage(**case)
    handled, _ = compute_optimal_token_baseline_advantage(**case, handle_zero_tail=True)
    assert without.tolist() == [[0.5, 0.0, 0.0], [-0.5, 0.0, 0.0]]
    assert handled.tolist() == [[0.5, 1.0, 1.0], [-0.5, 0.0, 0.0]]


def test_the_multi_turn_form_compares_the_nth_trained_tokens():
    tight = baseline_case([[0.0, 1.0], [0.0, 0.0]], [[1, 1], [1, 1]], [[0.25, 0.25], [0.75, 0.25]])
    # The same tokens with tool output between them, at different places in each row.
    spread = baseline_case(
        [[0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]],
        [[1, 0, 0, 1], [0, 1, 1, 0]],
        [[0.25, 9.0, 9.0, 0.25], [9.0, 0.75, 0.25, 9.0]],
    )
    expected, _ = compute_optimal_token_baseline_advantage(**tight)
    advantages, returns = compute_multi_turn_optimal_token_baseline_advantage(**spread)
    assert torch.equal(advantages[0, [0, 3]], expected[0])
    assert torch.equal(advantages[1, [1, 2]], expected[1])
    assert not advantages[spread["response_mask"] == 0].any()
    assert returns.tolist() == [[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]]


def test_without_tool_output_both_forms_are_the_same():
    case = baseline_case(
        [[0.0, 0.0, 1.0], [0.0, 3.0, 0.0]], [[1, 1, 1], [1, 1, 0]], [[0.25] * 3, [0.5] * 3]
    )
    for handle_zero_tail in (False, True):
        single, _ = compute_optimal_token_baseline_advantage(
            **case, handle_zero_tail=handle_zero_tail
        )
        multi, _ = compute_multi_turn_optimal_token_baseline_advantage(
            **case, handle_zero_tail=handle_zero_tail
        )
        torch.testing.assert_close(single, multi)


@settings(deadline=None, max_examples=50)
@given(case=cases(), handle_zero_tail=st.booleans())
def test_the_vectorised_form_equals_a_loop_over_positions(case, handle_zero_tail):
    columns = ("token_level_rewards", "response_mask", "index", "old_log_probs", "sum_pi_squared")
    advantages, _ = compute_optimal_token_baseline_advantage(
        **{name: vars(case)[name] for name in columns},
        rollout_is_weights=case.rollout_is_weights,
        handle_zero_tail=handle_zero_tail,
    )
    expected = slow_advantages(case, handle_zero_tail)
    assert advantages.tolist() == [pytest.approx(row, abs=1e-4) for row in expected]


def slow_advantages(case, handle_zero_tail):
    mask = case.response_mask.tolist()
    B, T = len(mask), len(mask[0])
    rewards = case.token_level_rewards.tolist()
    pi = case.old_log_probs.exp().tolist()
    noise = [
        [1 - 2 * pi[i][t] + case.sum_pi_squared[i, t].item() for t in range(T)] for i in range(B)
    ]
    expected = [[0.0] * T for _ in range(B)]
    for i in range(B):
        peers = [j for j in range(B) if case.index[j] == case.index[i]]
        all_equal = len({sum(rewards[j]) for j in peers}) == 1
        for t in range(T):
            if not mask[i][t]:
                continue
            running = [j for j in peers if any(mask[j][t:])]
            top = bottom = 0.0
            for j in peers:
                if mask[j][t]:
                    rho = case.rollout_is_weights[j].tolist()
                    terms = (rho[s] ** 2 * max(noise[j][s], 0) for s in range(t + 1) if mask[j][s])
                    weight = sum(terms) + 1e-8
                    top, bottom = top + weight * sum(rewards[j][t:]), bottom + weight
            is_tail = handle_zero_tail and len(running) == 1 and not all_equal
            expected[i][t] = sum(rewards[i][t:]) - (0.0 if is_tail else top / bottom)
    return expected

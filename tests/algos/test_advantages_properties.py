"""What must hold for every estimator, on any batch."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.algos.advantage_cases import (
    EVERY_ESTIMATOR,
    GROUP_ESTIMATORS,
    cases,
    estimate,
    make_case,
)

every_estimator = pytest.mark.parametrize("name", EVERY_ESTIMATOR)
quick = settings(deadline=None, max_examples=12)


@every_estimator
@quick
@given(case=cases(), data=st.data())
def test_rows_may_come_in_any_order(name, case, data):
    order = data.draw(st.permutations(range(len(case.index))))
    advantages, returns = estimate(name, case)
    shuffled_advantages, shuffled_returns = estimate(name, case.rows(order))
    if name == "grpo_passk":  # of two equal rewards neither gains anything
        assert advantages.sum() == pytest.approx(shuffled_advantages.sum().item(), abs=1e-4)
        return
    torch.testing.assert_close(shuffled_advantages, advantages[order], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(shuffled_returns, returns[order], atol=1e-5, rtol=1e-5)


@every_estimator
@quick
@given(case=cases(), columns=st.integers(1, 3), fill=st.sampled_from([0.0, 7.0, float("nan")]))
def test_padding_changes_nothing_whatever_it_holds(name, case, columns, fill):
    advantages, returns = estimate(name, case)
    padded_advantages, padded_returns = estimate(name, case.with_padding(columns, fill))
    torch.testing.assert_close(padded_advantages[:, :-columns], advantages)
    torch.testing.assert_close(padded_returns[:, :-columns], returns)
    assert not padded_advantages[:, -columns:].any()
    assert not padded_returns[:, -columns:].any()


@every_estimator
@quick
@given(case=cases())
def test_tokens_outside_the_mask_get_nothing_and_all_is_finite(name, case):
    for result in estimate(name, case):
        assert result.shape == case.response_mask.shape
        assert result.dtype == torch.float32
        assert torch.isfinite(result).all()
        assert not result[case.response_mask == 0].any()


@every_estimator
@pytest.mark.parametrize("masked", ["one row", "all rows"])
def test_a_fully_masked_row_gets_zero(name, masked):
    mask = [[0, 0], [1, 1], [1, 0], [1, 1]] if masked == "one row" else [[0, 0]] * 4
    case = make_case([1.0, 0.0, 2.0, 5.0], mask, ["a", "a", "b", "b"])
    for result in estimate(name, case):
        assert torch.isfinite(result).all()
        assert not result[0].any()


@every_estimator
def test_a_bool_mask_is_as_good_as_numbers(name):
    case = make_case([1.0, 0.0, 2.0, 5.0], [[1, 1], [1, 0], [1, 1], [1, 0]], ["a", "a", "b", "b"])
    expected, _ = estimate(name, case)
    for mask in (case.response_mask.bool(), case.response_mask.float()):
        result, _ = estimate(name, replace(case, response_mask=mask))
        torch.testing.assert_close(result, expected)


@every_estimator
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_is_refused_by_row(name, bad):
    case = make_case([1.0, 0.0, bad, 5.0], [[1, 1]] * 4, ["a", "a", "b", "b"])
    with pytest.raises(ValueError, match=r"token_level_rewards .* 1 of 4 rows \(row 2\)"):
        estimate(name, case)


@every_estimator
def test_no_gradient_flows_through_an_advantage(name):
    case = make_case([1.0, 0.0], [[1, 1]] * 2, ["a", "a"])
    case.values.requires_grad_(True)
    case.old_log_probs.requires_grad_(True)
    assert not any(result.requires_grad for result in estimate(name, case))


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
@quick
@given(case=cases(equal_in_group=True))
def test_equal_rewards_within_every_group_give_exactly_zero(name, case):
    advantages, _ = estimate(name, case)
    assert not advantages.any()


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
@pytest.mark.parametrize("size", [3, 7, 11])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_leave_no_rounding_noise(name, size, dtype):
    case = make_case([0.1] * size, [[1, 1, 0]] * (size - 1) + [[1, 1, 1]], ["a"] * size)
    case = replace(case, token_level_rewards=(case.token_level_rewards != 0).to(dtype) * 0.1)
    advantages, _ = estimate(name, case)
    assert not advantages.any()


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "grpo_passk", "gpg"])
def test_a_group_of_equal_rewards_gets_zero_beside_a_group_with_a_signal(name):
    case = make_case([0.1, 0.1, 0.1, 0.0, 1.0], [[1]] * 5, ["a", "a", "a", "b", "b"])
    advantages, _ = estimate(name, case)
    assert not advantages[:3].any()
    assert advantages[4, 0] > 0


@pytest.mark.parametrize(
    "name",
    ["grpo", "rloo", "opo", "grpo_passk", "reinforce_plus_plus", "reinforce_plus_plus_baseline"],
)
@quick
@given(case=cases(), shift=st.integers(-4, 4))
def test_a_constant_added_to_all_rewards_changes_nothing(name, case, shift):
    if name == "reinforce_plus_plus":
        case = replace(case, gamma=1.0)
    moved = case.token_level_rewards.clone()
    trained = case.response_mask.bool()
    last = torch.where(
        trained.any(-1), torch.where(trained, torch.arange(trained.shape[1]), 0).amax(-1), -1
    )
    moved[torch.arange(len(moved)), last] += shift
    advantages, _ = estimate(name, case)
    shifted, _ = estimate(name, replace(case, token_level_rewards=moved))
    torch.testing.assert_close(shifted, advantages, atol=2e-3, rtol=1e-4)


@pytest.mark.parametrize(
    "name", ["rloo", "rloo_vectorized", "opo", "gpg", "optimal_token_baseline"]
)
@quick
@given(case=cases(), factor=st.sampled_from([0.5, 2.0, 8.0]))
def test_an_estimator_without_normalisation_scales_with_the_reward(name, case, factor):
    advantages, _ = estimate(name, case)
    scaled = replace(case, token_level_rewards=case.token_level_rewards * factor)
    torch.testing.assert_close(estimate(name, scaled)[0], advantages * factor)


@pytest.mark.parametrize("name", ["grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_a_normalised_estimator_does_not_see_the_scale_of_the_reward(name):
    case = make_case([1.0, 0.0, 2.0, 5.0], [[1, 1], [1, 0], [1, 1], [1, 0]], ["a", "a", "b", "b"])
    advantages, _ = estimate(name, case)
    scaled = replace(case, token_level_rewards=case.token_level_rewards * 10)
    torch.testing.assert_close(estimate(name, scaled)[0], advantages, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["grpo", "rloo", "gpg"])
@quick
@given(case=cases())
def test_the_advantages_of_a_group_sum_to_zero(name, case):
    case = replace(case, response_mask=torch.ones_like(case.response_mask))
    advantages, _ = estimate(name, case)
    for label in set(case.index):
        assert advantages[case.index == label, 0].sum().item() == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
@quick
@given(case=cases())
def test_a_whitened_estimator_has_mean_zero_and_variance_one_over_the_batch(name, case):
    advantages, _ = estimate(name, case)
    kept = advantages[case.response_mask.bool()]
    if len(kept) < 2 or kept.std() < 0.5:  # too few tokens, or (nearly) equal returns
        return
    assert kept.mean().item() == pytest.approx(0, abs=1e-4)
    assert kept.std().item() == pytest.approx(1, abs=1e-3)

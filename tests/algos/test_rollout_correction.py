import math

import pytest
import torch
from torch import Tensor

from verl.algos.rollout_correction import (
    SUPPORTED_ROLLOUT_RS_OPTIONS,
    compute_offpolicy_metrics,
    compute_rollout_corr_metrics_from_logprobs,
    compute_rollout_correction_weights,
    compute_rollout_rejection_mask,
)
from verl.algos.rollout_correction.correction import parse_criteria


def log_ratios(ratios: list[list[float]]) -> Tensor:
    return torch.tensor(ratios, dtype=torch.float64).log()


MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])
RATIOS = [[2.0, 1.0, 4.0], [0.5, 0.5, 77.0]]  # products 8 and 0.25


# ---- weights -------------------------------------------------------------------------------------


def test_token_weights_are_truncated_ratios():
    weights, _ = compute_rollout_correction_weights(log_ratios(RATIOS), MASK, "token", 3.0)
    expected = torch.tensor([[2.0, 1.0, 3.0], [0.5, 0.5, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(weights, expected)


def test_sequence_weights_are_the_truncated_product_for_every_token():
    weights, _ = compute_rollout_correction_weights(log_ratios(RATIOS), MASK, "sequence", 5.0)
    expected = torch.tensor([[5.0] * 3, [0.25, 0.25, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(weights, expected)


def test_token_weights_are_normalised_by_their_mean_over_tokens():
    weights, metrics = compute_rollout_correction_weights(
        log_ratios(RATIOS), MASK, "token", 3.0, rollout_is_batch_normalize=True
    )
    assert metrics["rollout_is_batch_norm_factor"] == pytest.approx(7 / 5)
    assert weights.sum().item() / 5 == pytest.approx(1)


def test_sequence_weights_are_normalised_by_their_mean_over_sequences():
    weights, metrics = compute_rollout_correction_weights(
        log_ratios(RATIOS), MASK, "sequence", 5.0, rollout_is_batch_normalize=True
    )
    assert metrics["rollout_is_batch_norm_factor"] == pytest.approx(2.625)
    assert weights[:, 0].mean().item() == pytest.approx(1)


def test_weights_carry_no_gradient():
    log_ratio = log_ratios(RATIOS).requires_grad_()
    weights, _ = compute_rollout_correction_weights(log_ratio, MASK)
    assert not weights.requires_grad


def test_extreme_ratios_are_bounded_by_e_to_the_twenty():
    log_ratio = torch.tensor([[1e4, -1e4]])
    weights, metrics = compute_rollout_correction_weights(
        log_ratio, torch.ones(1, 2), "token", rollout_is_threshold=math.inf
    )
    assert weights[0].tolist() == pytest.approx([math.exp(20), math.exp(-20)], rel=1e-5)
    assert all(math.isfinite(value) for value in metrics.values())


def test_token_weight_metrics():
    _, metrics = compute_rollout_correction_weights(log_ratios(RATIOS), MASK, "token", 3.0)
    mean = 8 / 5
    assert metrics == pytest.approx(
        {
            "rollout_is_mean": mean,
            "rollout_is_max": 4.0,
            "rollout_is_min": 0.5,
            "rollout_is_std": math.sqrt((4 + 1 + 9 + 0.25 + 0.25) / 5 - (7 / 5) ** 2),
            "rollout_is_eff_sample_size": 7.0**2 / (5 * (4 + 1 + 9 + 0.25 + 0.25)),
            "rollout_is_ratio_fraction_high": 1 / 5,
            "rollout_is_ratio_fraction_low": 0.0,
            "rollout_is_seq_mean": (7 / 3 + 0.5) / 2,
            "rollout_is_seq_std": (7 / 3 - 0.5) / math.sqrt(2),
            "rollout_is_seq_max": 7 / 3,
            "rollout_is_seq_min": 0.5,
            "rollout_is_seq_max_deviation": 4 / 3,
            "rollout_is_seq_fraction_high": 0.0,
            "rollout_is_seq_fraction_low": 0.0,
        }
    )


def test_sequence_weight_metrics_count_sequences_beyond_the_threshold():
    _, metrics = compute_rollout_correction_weights(log_ratios(RATIOS), MASK, "sequence", 3.0)
    assert metrics["rollout_is_seq_max"] == pytest.approx(8)
    assert metrics["rollout_is_seq_fraction_high"] == 0.5
    assert metrics["rollout_is_seq_fraction_low"] == 0.5
    assert metrics["rollout_is_ratio_fraction_high"] == 0.5
    assert metrics["rollout_is_ratio_fraction_low"] == 0.5


def test_std_and_effective_sample_size_are_of_ratios_bounded_on_both_sides():
    _, metrics = compute_rollout_correction_weights(
        log_ratios([[4.0, 0.25]]), torch.ones(1, 2), "token", 2.0
    )
    # 4 counts as 2 and 1/4 as 1/2: mean 5/4, mean square 17/8.
    assert metrics["rollout_is_std"] == pytest.approx(3 / 4)
    assert metrics["rollout_is_eff_sample_size"] == pytest.approx((25 / 16) / (17 / 8))
    assert metrics["rollout_is_mean"] == pytest.approx(17 / 8)
    assert metrics["rollout_is_seq_std"] == 0  # of one sequence


def test_equal_policies_have_weight_one_and_the_full_sample_size():
    weights, metrics = compute_rollout_correction_weights(torch.zeros(2, 3), MASK, "sequence")
    assert torch.equal(weights, MASK.float())
    assert metrics["rollout_is_eff_sample_size"] == 1.0


def test_unusable_weight_options_are_refused():
    with pytest.raises(ValueError, match="one of: token, sequence"):
        compute_rollout_correction_weights(torch.zeros(2, 3), MASK, "tokens")
    with pytest.raises(ValueError, match="rollout_is_threshold is 0"):
        compute_rollout_correction_weights(torch.zeros(2, 3), MASK, "token", 0)


# ---- rejection -----------------------------------------------------------------------------------


def kept(ratios: list[list[float]], rollout_rs: str, threshold: str | float) -> list[list[int]]:
    mask = torch.ones(len(ratios), len(ratios[0]), dtype=torch.int64)
    return compute_rollout_rejection_mask(log_ratios(ratios), mask, rollout_rs, threshold)[
        0
    ].tolist()


def test_k1_bounds_apply_to_the_ratio_of_training_to_rollout_itself():
    assert kept([[1.5, 0.6, 2.1, 0.9]], "token_k1", "0.8_2.0") == [[1, 0, 0, 1]]


def test_a_single_k1_threshold_is_a_symmetric_band():
    assert kept([[0.4, 0.6, 1.9, 2.1]], "token_k1", 2.0) == [[0, 1, 1, 0]]
    assert kept([[0.4, 0.6, 1.9, 2.1]], "token_k1", "2.0") == [[0, 1, 1, 0]]


def test_sequence_sum_bounds_the_product_and_sequence_mean_the_geometric_mean():
    ratios = [[1.5, 1.5], [3.0, 0.5], [1.1, 1.1]]  # products 2.25, 1.5, 1.21
    assert kept(ratios, "seq_sum_k1", "0.5_2.0") == [[0, 0], [1, 1], [1, 1]]
    # geometric means 1.5, 1.22, 1.1
    assert kept(ratios, "seq_mean_k1", "0.5_1.3") == [[0, 0], [1, 1], [1, 1]]


def test_k2_and_k3_have_one_upper_bound_and_see_both_directions():
    e = math.exp
    assert kept([[e(0.5), e(-0.5), e(1.0)]], "token_k2", 0.2) == [[1, 1, 0]]  # 0.125 0.125 0.5
    assert kept([[2.0, 0.5, 1.0]], "token_k3", 0.25) == [[0, 1, 1]]  # 0.307, 0.193, 0


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("seq_sum_k2", 0.125 + 0.02),
        ("seq_mean_k2", (0.125 + 0.02) / 2),
        ("seq_max_k2", 0.125),
        ("seq_sum_k3", math.exp(0.5) - 1.5 + math.exp(-0.2) - 0.8),
        ("seq_mean_k3", (math.exp(0.5) - 1.5 + math.exp(-0.2) - 0.8) / 2),
        ("seq_max_k3", math.exp(0.5) - 1.5),
    ],
)
def test_sequence_divergences(option: str, value: float):
    ratios = [[math.exp(0.5), math.exp(-0.2)]]
    assert kept(ratios, option, value * 1.001) == [[1, 1]]
    assert kept(ratios, option, value * 0.999) == [[0, 0]]


def test_masked_tokens_do_not_count_in_sequence_criteria():
    mask = torch.tensor([[1, 0]])
    for option in SUPPORTED_ROLLOUT_RS_OPTIONS:
        threshold = "0.5_2.0" if option.endswith("k1") else 0.1
        result, _ = compute_rollout_rejection_mask(
            log_ratios([[1.1, 50.0]]), mask, option, threshold
        )
        assert torch.equal(result, mask)


def test_criteria_are_combined_and_each_may_have_its_own_threshold():
    ratios = [[1.0, 1.0, 3.0], [1.0, 1.0, 30.0], [1.0, 1.0, 1.0]]
    assert kept(ratios, "token_k1, seq_max_k3", "0.5_2.0, 5.0") == [[1, 1, 0], [0, 0, 0], [1, 1, 1]]


def test_one_threshold_serves_all_criteria():
    assert kept([[3.0, 1.0], [1.1, 1.0]], "token_k2,seq_mean_k3", 0.1) == [[0, 0], [1, 1]]


def test_rejection_metrics_are_those_of_the_divergence():
    mask, metrics = compute_rollout_rejection_mask(
        log_ratios(RATIOS), MASK, "token_k1,seq_sum_k2", "0.6_3.0,1.0"
    )
    assert mask.tolist() == [[0, 0, 0], [0, 0, 0]]
    log_2 = math.log(2)  # k1 is -1, 0, -2 and 1, 1 of it; the bounds are -1.1 and 0.51
    expected_k1 = {
        "mean": -log_2 / 5,
        "max": log_2,
        "min": -2 * log_2,
        "std": math.sqrt(7 / 5 - 1 / 25) * log_2,
        "fraction_high": 2 / 5,
        "fraction_low": 1 / 5,
        "masked_fraction": 3 / 5,
        "seq_masked_fraction": 1.0,
        "seq_mean": 0.0,
        "seq_std": math.sqrt(2) * log_2,
        "seq_max": log_2,
        "seq_min": -log_2,
        "seq_max_deviation": log_2,
        "seq_fraction_high": 0.5,
        "seq_fraction_low": 0.0,
    }
    found = {
        name.removeprefix("rollout_rs_token_k1_"): value
        for name, value in metrics.items()
        if name.startswith("rollout_rs_token_k1_")
    }
    assert found == pytest.approx(expected_k1, abs=1e-6)
    k2 = [math.log(2) ** 2 * (1 + 4) / 2, math.log(2) ** 2]
    assert metrics["rollout_rs_seq_sum_k2_seq_max"] == pytest.approx(k2[0])
    assert metrics["rollout_rs_seq_sum_k2_mean"] == pytest.approx((3 * k2[0] + 2 * k2[1]) / 5)
    assert metrics["rollout_rs_seq_sum_k2_fraction_high"] == 0.5  # of sequences
    assert metrics["rollout_rs_seq_sum_k2_seq_masked_fraction"] == 0.5
    assert metrics["rollout_rs_masked_fraction"] == 1.0
    assert metrics["rollout_rs_seq_masked_fraction"] == 1.0


def test_what_stands_outside_the_mask_is_never_looked_at():
    old, rollout = log_ratios(RATIOS), torch.zeros(2, 3)
    clean = compute_offpolicy_metrics(old, rollout, MASK)
    noisy = [torch.where(MASK.bool(), values, torch.nan) for values in (old, rollout)]
    assert compute_offpolicy_metrics(*noisy, MASK) == clean


def test_a_batch_without_tokens_has_no_metrics_and_stays_empty():
    empty = torch.zeros_like(MASK)
    weights, metrics = compute_rollout_correction_weights(
        log_ratios(RATIOS), empty, rollout_is_batch_normalize=True
    )
    assert metrics == {}
    assert (weights == 0).all()
    for option in SUPPORTED_ROLLOUT_RS_OPTIONS:
        mask, metrics = compute_rollout_rejection_mask(log_ratios(RATIOS), empty, option, 2.0)
        assert metrics == {}
        assert torch.equal(mask, empty)
    assert compute_offpolicy_metrics(log_ratios(RATIOS), log_ratios(RATIOS), empty) == {}


def test_the_mask_keeps_its_type():
    for mask in (MASK, MASK.bool(), MASK.float()):
        result, _ = compute_rollout_rejection_mask(log_ratios(RATIOS), mask, "token_k1", 3.0)
        assert result.dtype == mask.dtype


@pytest.mark.parametrize(
    ("rollout_rs", "threshold", "message"),
    [
        ("token", "0.5_2.0", "names 'token'; it must be a comma-separated list of: token_k1"),
        ("seq_max_k1", "0.5_2.0", "names 'seq_max_k1'"),
        ("token_k1,", "0.5_2.0", "names ''"),
        ("token_k1,token_k1", "0.5_2.0", "names 'token_k1' twice"),
        ("token_k1", None, "rollout_rs_threshold is not set"),
        ("token_k1,token_k2,token_k3", "0.5_2.0,1", "2 values for the 3 options"),
        ("token_k1", "2.0_0.5", "0 < lower < upper"),
        ("token_k1", "-1_2", "0 < lower < upper"),
        ("token_k1", "0.5", "one number above 1"),
        ("token_k1", "0", "one number above 1"),
        ("token_k1", "nan", "one number above 1"),
        ("token_k1", "low_high", "holds 'low', which is not a number"),
        ("token_k2", "0.5_2.0", "holds '0.5_2.0', which is not a number"),
        ("token_k3", "0", "must be greater than 0"),
        ("token_k3", "nan", "must be greater than 0"),
    ],
)
def test_criteria_that_make_no_sense_are_refused_with_the_rule(rollout_rs, threshold, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        parse_criteria(rollout_rs, threshold)


def test_every_supported_option_is_understood():
    assert len(SUPPORTED_ROLLOUT_RS_OPTIONS) == 11
    for option in SUPPORTED_ROLLOUT_RS_OPTIONS:
        (criterion,) = parse_criteria(option, 2.0)
        assert f"{criterion.level}_{criterion.divergence}" == option


# ---- metrics -------------------------------------------------------------------------------------


def test_offpolicy_metrics():
    rollout = torch.tensor([[-1.0, -2.0, -3.0], [-1.0, -1.0, 5.0]], dtype=torch.float64)
    old = rollout + torch.tensor([[0.3, 0.0, -0.6], [0.2, 0.2, 9.0]], dtype=torch.float64)
    e = math.exp
    assert compute_offpolicy_metrics(old, rollout, MASK) == pytest.approx(
        {
            "kl": (-0.3 + 0.6 - 0.4) / 5,
            "k3_kl": (e(0.3) - 1.3 + e(-0.6) - 0.4 + 2 * (e(0.2) - 1.2)) / 5,
            "training_log_ppl": (2.1 + 0.8) / 2,
            "training_ppl": (e(2.1) + e(0.8)) / 2,
            "rollout_log_ppl": (2.0 + 1.0) / 2,
            "rollout_ppl": (e(2.0) + e(1.0)) / 2,
            "log_ppl_diff": (0.1 - 0.2) / 2,
            "log_ppl_abs_diff": 0.15,
            "log_ppl_diff_max": 0.1,
            "log_ppl_diff_min": -0.2,
            "ppl_ratio": (e(0.1) + e(-0.2)) / 2,
            "chi2_token": (e(0.6) + 1 + e(-1.2) + 2 * e(0.4)) / 5 - 1,
            "chi2_seq": (e(-0.6) + e(0.8)) / 2 - 1,
        }
    )


def test_without_rollout_log_probs_only_the_training_perplexity_is_known():
    metrics = compute_offpolicy_metrics(torch.full((2, 3), -1.0), None, MASK)
    assert metrics == pytest.approx({"training_log_ppl": 1.0, "training_ppl": math.e})


def test_metrics_of_the_current_policy_have_the_prefix_of_rollout_correction():
    log_prob = torch.full((2, 3), -1.0, requires_grad=True)
    metrics = compute_rollout_corr_metrics_from_logprobs(log_prob, log_prob.detach(), MASK)
    assert metrics["rollout_corr/kl"] == 0
    assert metrics["rollout_corr/ppl_ratio"] == 1
    assert all(name.startswith("rollout_corr/") for name in metrics)


def test_a_sequence_without_tokens_counts_nowhere():
    log_prob = torch.tensor([[-1.0, -1.0], [-9.0, -9.0]])
    mask = torch.tensor([[1, 1], [0, 0]])
    alone = compute_offpolicy_metrics(log_prob[:1], log_prob[:1] - 0.1, mask[:1])
    assert compute_offpolicy_metrics(log_prob, log_prob - 0.1, mask) == alone

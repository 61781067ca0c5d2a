import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.algos.loss_cases import CASES, Batch, actor, gradient_of, loss_of
from tests.registries import restored
from verl.algos.policy_losses import (
    compute_policy_loss,
    compute_policy_loss_reinforce,
    compute_policy_loss_vanilla,
)
from verl.algos.policy_losses.terms import log_ratio
from verl.algos.registry import POLICY_LOSS_REGISTRY, get_policy_loss_fn, register_policy_loss
from verl.algos.rollout_correction.apply import choose_bypass_loss
from verl.config.algorithm import RolloutCorrectionConfig


def batch_with_ratios(ratios: list[list[float]], advantages: list[list[float]]) -> Batch:
    """log_prob is -1 for every token, and old_log_prob such that the ratios are as given."""
    log_prob = torch.full((len(ratios), len(ratios[0])), -1.0, dtype=torch.float64)
    return Batch(
        old_log_prob=log_prob - torch.tensor(ratios, dtype=torch.float64).log(),
        log_prob=log_prob,
        advantages=torch.tensor(advantages, dtype=torch.float64),
        response_mask=torch.ones(log_prob.shape, dtype=torch.int64),
    )


def assert_values(actual: Tensor, expected: Any) -> None:
    torch.testing.assert_close(
        actual, torch.tensor(expected, dtype=actual.dtype), rtol=0, atol=1e-12
    )


# ---- vanilla -------------------------------------------------------------------------------------

#                 improved  fine  improved  exploded  hurt  hurt  masked
RATIOS = [[1.5, 1.1, 0.5, 5.0, 0.7, 2.0, 9.0]]
ADVANTAGES = [[1.0, 1.0, -1.0, -1.0, 1.0, -1.0, 9.0]]
LOSSES = [-1.28, -1.1, 0.8, 3.0, -0.7, 2.0]  # with low 0.2, high 0.28, c 3


def ppo_batch() -> Batch:
    batch = batch_with_ratios(RATIOS, ADVANTAGES)
    batch.response_mask[0, -1] = 0
    return batch


def test_vanilla_clips_only_steps_that_already_improved_the_objective():
    config = actor(clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=3.0)
    loss, _ = loss_of(ppo_batch(), config)
    assert loss.item() == pytest.approx(sum(LOSSES) / 6, abs=1e-12)
    # d(-A r)/d log_prob = -A r where no clip took effect
    expected = [[0, -1.1 / 6, 0, 0, -0.7 / 6, 2.0 / 6, 0]]
    assert_values(gradient_of(ppo_batch(), config), expected)


def test_vanilla_reports_masked_clip_fractions_and_kl():
    _, metrics = loss_of(ppo_batch(), actor(clip_ratio_low=0.2, clip_ratio_high=0.28))
    log_ratios = [math.log(ratio) for ratio in RATIOS[0][:6]]
    assert metrics == pytest.approx(
        {
            "actor/pg_clipfrac": 2 / 6,  # 1.5 with A > 0 and 0.5 with A < 0
            "actor/ppo_kl": -sum(log_ratios) / 6,
            "actor/pg_clipfrac_lower": 1 / 6,  # 5.0 with A < 0
        }
    )


def test_the_bounds_of_the_clip_range_are_independent():
    up = batch_with_ratios([[1.25, 1.35]], [[1.0, 1.0]])
    assert_values(gradient_of(up, actor(clip_ratio_low=0.2, clip_ratio_high=0.28)), [[-0.625, 0]])
    down = batch_with_ratios([[0.75, 0.65]], [[-1.0, -1.0]])
    assert_values(gradient_of(down, actor(clip_ratio_low=0.3, clip_ratio_high=0.1)), [[0.375, 0]])


def test_dual_clip_leaves_positive_advantages_alone():
    config = actor(clip_ratio_high=9.0, clip_ratio_c=3.0)
    loss, metrics = loss_of(batch_with_ratios([[5.0]], [[2.0]]), config)
    assert loss.item() == pytest.approx(-10.0)
    assert metrics["actor/pg_clipfrac_lower"] == 0
    loss, metrics = loss_of(batch_with_ratios([[5.0]], [[-2.0]]), config)
    assert loss.item() == pytest.approx(6.0)
    assert metrics["actor/pg_clipfrac_lower"] == 1


def test_importance_weights_multiply_each_token_and_carry_no_gradient():
    batch = batch_with_ratios([[1.0, 1.0]], [[1.0, 2.0]]).with_gradient()
    weights = torch.tensor([[0.5, 3.0]], dtype=torch.float64, requires_grad=True)
    loss, _ = loss_of(batch, actor(), rollout_is_weights=weights)
    loss.backward()
    assert loss.item() == pytest.approx(-(0.5 + 6.0) / 2)
    assert_values(batch.log_prob.grad, [[-0.25, -3.0]])
    assert weights.grad is None


def test_the_older_form_gives_the_numbers_of_vanilla():
    batch = ppo_batch()
    with pytest.warns(DeprecationWarning, match="compute_policy_loss_vanilla"):
        values = compute_policy_loss(*vars(batch).values(), cliprange=0.28, cliprange_low=0.2)
    loss, metrics = loss_of(batch, actor(clip_ratio_low=0.2, clip_ratio_high=0.28))
    assert [value.item() for value in values] == pytest.approx(
        [loss.item(), *map(float, metrics.values())]
    )


def test_the_older_form_needs_a_clip_range():
    with (
        pytest.warns(DeprecationWarning, match="deprecated"),
        pytest.raises(ValueError, match="needs cliprange"),
    ):
        compute_policy_loss(*vars(ppo_batch()).values())


def test_a_dual_clip_bound_of_one_is_refused():
    with (
        pytest.warns(DeprecationWarning, match="deprecated"),
        pytest.raises(ValueError, match="greater than 1"),
    ):
        compute_policy_loss(*vars(ppo_batch()).values(), cliprange=0.2, clip_ratio_c=1.0)


def test_a_loss_with_options_says_so_when_it_gets_none():
    with pytest.raises(ValueError, match="pass an ActorConfig"):
        compute_policy_loss_vanilla(*vars(ppo_batch()).values())


def test_clip_ratio_stands_in_for_a_bound_that_is_null():
    config = actor(clip_ratio=0.5, clip_ratio_low=None, clip_ratio_high=None)
    assert_values(gradient_of(batch_with_ratios([[1.4, 1.6]], [[1.0, 1.0]]), config), [[-0.7, 0.0]])


# ---- the other losses ----------------------------------------------------------------------------


def test_gspo_uses_one_length_normalised_ratio_per_sequence():
    # geometric means 1.1 and 2; the second leaves the clip range
    batch = batch_with_ratios([[1.21, 1.0], [4.0, 1.0]], [[1.0, 1.0], [1.0, 1.0]])
    config = actor("gspo", clip_ratio_low=0.2, clip_ratio_high=0.28)
    loss, metrics = loss_of(batch, config)
    assert loss.item() == pytest.approx((-1.1 - 1.28) / 2)
    # each token gets 1/n of the gradient of its sequence, whatever its own ratio
    assert_values(gradient_of(batch, config), [[-1.1 / 4, -1.1 / 4], [0, 0]])
    assert metrics["actor/pg_clipfrac"] == 0.5
    assert metrics["actor/pg_clipfrac_lower"] == 0
    assert metrics["actor/ppo_kl"] == pytest.approx(-(math.log(1.21) + math.log(4)) / 4)


def test_gspo_bounds_the_sequence_ratio_by_e_to_the_ten():
    batch = batch_with_ratios([[math.exp(15)] * 2], [[-1.0, -1.0]])
    loss, _ = loss_of(batch, actor("gspo"))
    assert loss.item() == pytest.approx(math.exp(10))


@pytest.mark.parametrize("case", ["gspo", "sapo"])
def test_sequence_losses_weigh_sequences_alike_in_every_aggregation_mode(case: str):
    batch = batch_with_ratios([[1.1, 1.2, 0.9], [1.3, 1.0, 1.0]], [[1.0] * 3, [-1.0] * 3])
    batch.response_mask[1, 1:] = 0
    modes = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
    losses = {loss_of(batch, actor(case, loss_scale_factor=5), mode)[0].item() for mode in modes}
    assert len(losses) == 1


def test_sapo_gates_the_ratio_with_a_sigmoid():
    def sigmoid(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    config = actor("sapo", tau_pos=1.0, tau_neg=2.0)
    batch = batch_with_ratios([[2.0, 2.0]], [[1.0, -1.0]])
    loss, metrics = loss_of(batch, config)
    assert loss.item() == pytest.approx((-4 * sigmoid(1) + 2 * sigmoid(2)) / 2)
    # d/d log_prob of A 4/tau sigmoid(tau (r - 1)) = A 4 sigmoid' r
    slopes = [-4 * sigmoid(1) * sigmoid(-1) * 2 / 2, 4 * sigmoid(2) * sigmoid(-2) * 2 / 2]
    assert_values(gradient_of(batch, config), [slopes])
    assert metrics["actor/pg_clipfrac"] == metrics["actor/pg_clipfrac_lower"] == 0
    assert metrics["actor/ppo_kl"] == pytest.approx(-math.log(2))


def test_gpg_is_the_plain_policy_gradient():
    batch = batch_with_ratios([[3.0, 0.1]], [[1.0, -2.0]])
    loss, metrics = loss_of(batch, actor("gpg"))
    assert loss.item() == pytest.approx((1.0 - 2.0) / 2)  # -A log_prob with log_prob = -1
    assert_values(gradient_of(batch, actor("gpg")), [[-0.5, 1.0]])
    assert metrics == {}


def test_cispo_keeps_the_gradient_of_clipped_tokens_and_none_through_the_weight():
    batch = batch_with_ratios([[3.0, 0.1, 1.1]], [[1.0, 1.0, -2.0]])
    config = actor("cispo", clip_ratio_low=10.0, clip_ratio_high=0.2)
    loss, metrics = loss_of(batch, config)
    assert loss.item() == pytest.approx((1.2 + 0.1 - 2.2) / 3)  # weights 1.2, 0.1, 1.1
    assert_values(gradient_of(batch, config), [[-1.2 / 3, -0.1 / 3, 2.2 / 3]])
    assert metrics["actor/pg_clipfrac"] == pytest.approx(1 / 3)
    assert metrics["actor/pg_clipfrac_lower"] == 0


def test_geo_mean_clips_log_ratios_by_the_sign_of_the_advantage():
    e = math.exp
    batch = batch_with_ratios(
        [[e(0.8), e(0.1)], [e(-0.8), e(0.9)], [e(-0.8), e(0.1)]],
        [[1.0, 3.0], [-1.0, -1.0], [1.0, 1.0]],
    )
    config = actor("geo_mean", clip_ratio_low=0.4, clip_ratio_high=0.4)
    loss, metrics = loss_of(batch, config)
    # mean clipped log ratios: (0.4 + 0.1) / 2, (-0.4 + 0.9) / 2, (-0.8 + 0.1) / 2
    assert loss.item() == pytest.approx((-2 * e(0.25) + e(0.25) - e(-0.35)) / 3)
    expected = [[0, -2 * e(0.25) / 6], [0, e(0.25) / 6], [-e(-0.35) / 6, -e(-0.35) / 6]]
    assert_values(gradient_of(batch, config), expected)
    assert metrics["actor/pg_clipfrac"] == pytest.approx(1 / 6)
    assert metrics["actor/pg_clipfrac_lower"] == pytest.approx(1 / 6)


@pytest.mark.parametrize(("ratio", "advantage"), [(0.5, 0.5), (2.0, -0.5), (0.5, 0.0)])
def test_geo_mean_leaves_ratios_alone_that_have_moved_the_wrong_way(ratio, advantage):
    batch = batch_with_ratios([[ratio]], [[advantage]])
    loss, metrics = loss_of(batch, actor("geo_mean", clip_ratio_low=0.4, clip_ratio_high=0.4))
    assert loss.item() == pytest.approx(-advantage * ratio)
    assert metrics["actor/pg_clipfrac"] == metrics["actor/pg_clipfrac_lower"] == 0


def test_geo_mean_takes_the_geometric_mean_of_importance_weights():
    batch = batch_with_ratios([[1.0, 1.0]], [[1.0, 1.0]])
    weights = torch.tensor([[4.0, 0.25]], dtype=torch.float64)
    assert loss_of(batch, actor("geo_mean"), rollout_is_weights=weights)[0].item() == -1.0
    weights = torch.tensor([[1.5, 1.5]], dtype=torch.float64)
    loss, _ = loss_of(batch, actor("geo_mean"), rollout_is_weights=weights)
    assert loss.item() == pytest.approx(-1.5)


def test_geo_mean_leaves_rejected_tokens_out_of_its_means_and_keeps_their_sequence():
    """Whatever the precision: a weight of 0 has no logarithm."""
    ratios = [[1.2, 1.0, 3.0], [3.0, 3.0, 3.0], [1.0, 1.0, 1.0]]
    correction = RolloutCorrectionConfig.bypass_ppo_clip()
    correction = replace(correction, rollout_rs="token_k1", rollout_rs_threshold="0.5_2.0")
    for dtype in (torch.float32, torch.float64):
        batch = batch_with_ratios(ratios, [[1.0] * 3, [1.0] * 3, [-1.0] * 3])
        batch = Batch(*(column.to(dtype) for column in vars(batch).values()))
        config = actor("geo_mean", clip_ratio_low=0.4, clip_ratio_high=0.4)
        choose_bypass_loss(correction, config.policy_loss)
        loss, _ = loss_of(batch, config)
        assert loss.item() == pytest.approx((-(1.2**0.5) + 1.0) / 3, rel=1e-6)
        half = -(1.2**0.5) / 6
        expected = torch.tensor([[half, half, 0], [0, 0, 0], [1 / 9] * 3])
        torch.testing.assert_close(gradient_of(batch, config).float(), expected)


def test_geo_mean_counts_sequences_not_tokens():
    batch = batch_with_ratios([[1.0] * 3] * 3, [[1.0] * 3, [4.0] * 3, [9.0] * 3])
    batch.response_mask[1, 1:] = 0
    batch.response_mask[2] = 0  # no token: not a sequence of the batch
    assert loss_of(batch, actor("geo_mean"))[0].item() == pytest.approx(-2.5)


def test_reinforce_weighs_log_probs_and_reports_the_divergence_from_the_rollout():
    batch = batch_with_ratios([[2.0, 0.5, 4.0]], [[1.0, -1.0, 2.0]]).with_gradient()
    weights = torch.tensor([[2.0, 0.5, 2.0]], dtype=torch.float64)
    loss, metrics = compute_policy_loss_reinforce(
        rollout_log_prob=batch.old_log_prob,
        log_prob=batch.log_prob,
        advantages=batch.advantages,
        response_mask=batch.response_mask,
        rollout_is_weights=weights,
    )
    loss.backward()
    assert loss.item() == pytest.approx(2.0 - 0.5 + 4.0)  # one sequence, summed
    assert_values(batch.log_prob.grad, [[-2.0, 0.5, -4.0]])
    assert metrics == {"actor/ppo_kl": pytest.approx(-math.log(4.0) / 3)}


# ---- bypass mode ---------------------------------------------------------------------------------


def bypass(correction: RolloutCorrectionConfig, **options: Any) -> Any:
    config = actor("bypass ppo_clip", **options)
    config.policy_loss.rollout_correction = correction
    return config


def test_bypass_ppo_clip_is_vanilla_against_the_rollout_policy():
    config = bypass(RolloutCorrectionConfig.bypass_ppo_clip())
    loss, metrics = loss_of(ppo_batch(), config)
    expected, expected_metrics = loss_of(ppo_batch(), actor())
    assert loss.item() == expected.item()
    assert {n: v for n, v in metrics.items() if n.startswith("actor/")} == expected_metrics
    assert metrics["rollout_corr/kl"] == pytest.approx(expected_metrics["actor/ppo_kl"])


def test_bypass_ppo_clip_has_no_weights_beside_the_ratio():
    correction = RolloutCorrectionConfig(rollout_is="token", bypass_mode=True, loss_type="ppo_clip")
    loss, metrics = loss_of(ppo_batch(), bypass(correction))
    assert loss.item() == loss_of(ppo_batch(), actor())[0].item()
    reinforce = RolloutCorrectionConfig(rollout_is="token", bypass_mode=True, loss_type="reinforce")
    _, expected = loss_of(ppo_batch(), bypass(reinforce))
    reported = {name: value for name, value in metrics.items() if "rollout_is" in name}
    assert reported == {name: value for name, value in expected.items() if "rollout_is" in name}
    assert reported["rollout_corr/rollout_is_max"] > 1


def test_bypass_reinforce_truncates_the_weights_of_sequences():
    batch = batch_with_ratios([[2.0, 1.5], [0.5, 0.5]], [[1.0, 1.0], [1.0, -1.0]])
    config = bypass(RolloutCorrectionConfig.bypass_pg_is(2.0))
    # weights min(3, 2) and 0.25
    expected = [[-2.0 / 4, -2.0 / 4], [-0.25 / 4, 0.25 / 4]]
    assert_values(gradient_of(batch, config), expected)
    _, metrics = loss_of(batch, config)
    assert metrics["rollout_corr/rollout_is_max"] == pytest.approx(3.0)


def test_bypass_rejection_gives_weight_zero_and_keeps_the_denominator():
    batch = batch_with_ratios([[1.1, 1.1], [3.0, 1.0]], [[1.0, 1.0], [1.0, 1.0]])
    config = bypass(RolloutCorrectionConfig.bypass_pg_geo_rs("0.5_1.5"))  # rejects sqrt(3)
    assert_values(gradient_of(batch, config), [[-0.25, -0.25], [0, 0]])
    _, metrics = loss_of(batch, config)
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == 0.5


def test_bypass_normalises_weights_over_a_whole_batch_and_refuses_a_part():
    batch = batch_with_ratios([[1.0, 1.5]], [[1.0, 1.0]])
    correction = RolloutCorrectionConfig(
        rollout_is="token", rollout_is_batch_normalize=True, loss_type="reinforce"
    )
    config = bypass(correction, global_batch_info={"batch_num_tokens": 2})
    assert_values(gradient_of(batch, config), [[-0.8 / 2, -1.2 / 2]])
    config.global_batch_info = {"batch_num_tokens": 3}
    with pytest.raises(ValueError, match="rollout_is_batch_normalize"):
        loss_of(batch, config)
    for harmless in ({"rollout_is_batch_normalize": False}, {"loss_type": "ppo_clip"}):
        config.policy_loss.rollout_correction = replace(correction, **harmless)
        assert loss_of(batch, config)[0].isfinite()


def test_bypass_mode_refuses_what_it_cannot_use():
    with pytest.raises(ValueError, match="bypass_mode=True, not by loss_mode"):
        loss_of(ppo_batch(), bypass(None))
    config = bypass(RolloutCorrectionConfig.bypass_ppo_clip())
    with pytest.raises(ValueError, match="leave rollout_is_weights at None"):
        loss_of(ppo_batch(), config, rollout_is_weights=ppo_batch().advantages)


def test_the_log_ratio_is_bounded_and_zero_outside_the_mask():
    log_prob = torch.tensor([[30.0, -30.0, 0.5, float("nan")]])
    ratio = log_ratio(log_prob, torch.zeros(1, 4), torch.tensor([[1, 1, 1, 0]]))
    assert ratio.tolist() == [[20.0, -20.0, 0.5, 0.0]]


# ---- all of them ---------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_at_ratio_one_every_loss_has_the_gradient_of_the_plain_policy_gradient(case: str):
    # Equal advantages have no covariance: clip_cov selects nothing.
    batch = batch_with_ratios([[1.0] * 4], [[1.5] * 4])
    gradient = gradient_of(batch, actor(case))
    assert gradient.tolist() == [[-1.5 / 4] * 4]


@pytest.mark.parametrize("case", CASES)
def test_a_loss_takes_the_keywords_of_the_contract_and_returns_a_scalar_and_numbers(case: str):
    loss, metrics = loss_of(ppo_batch(), actor(case))
    assert loss.shape == ()
    for value in metrics.values():
        assert isinstance(value, float) or (value.shape == () and not value.requires_grad)
    assert all(name.startswith(("actor/", "rollout_corr/")) for name in metrics)


def test_ppo_kl_is_zero_in_the_first_mini_batch_and_not_in_the_second():
    logits = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    tokens = torch.tensor([[0, 1], [2, 0]])
    old_log_prob = logits.detach().log_softmax(-1)[tokens]
    seen = []
    for rows in ([0], [1]):
        batch = Batch(
            old_log_prob[rows],
            logits.log_softmax(-1)[tokens[rows]],
            torch.tensor([[1.0, 2.0]], dtype=torch.float64),
            torch.ones(1, 2),
        )
        loss, metrics = loss_of(batch, actor())
        seen.append(metrics["actor/ppo_kl"])
        (gradient,) = torch.autograd.grad(loss, logits)
        with torch.no_grad():
            logits -= 0.5 * gradient
    assert seen[0] == 0.0
    assert abs(seen[1]) > 0.01


def test_hyphens_and_underscores_name_the_same_loss():
    assert get_policy_loss_fn("clip-cov") is get_policy_loss_fn("clip_cov")
    assert get_policy_loss_fn("kl-cov") is get_policy_loss_fn("kl_cov")


@pytest.fixture
def own_names():
    with restored(POLICY_LOSS_REGISTRY):
        yield


def test_a_users_loss_is_called_by_the_same_contract(own_names):
    @register_policy_loss("test_policy_losses_squared")
    def squared(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str,
        config: Any,
        rollout_is_weights: Tensor | None,
    ) -> tuple[Tensor, dict[str, Any]]:
        return (log_prob**2).mean(), {"actor/mine": 1.0}

    config = actor()
    config.policy_loss.loss_mode = "test_policy_losses_squared"
    assert loss_of(ppo_batch(), config)[0].item() == 1.0

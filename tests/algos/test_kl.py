"""KL estimators: their values, and their gradients against the exact KL of a tiny vocabulary."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algos.kl import (
    AdaptiveKLController,
    FixedKLController,
    compute_rewards,
    get_kl_controller,
    kl_penalty,
    kl_penalty_forward,
)
from verl.config.algorithm import KLControlConfig

EVERY_NAME = ["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"]


def two_policies():
    """Log-probabilities over five tokens of a policy (with gradient) and of a reference."""
    logits = torch.tensor([0.3, -1.0, 0.8, 0.0, -0.4], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-0.2, 0.5, 0.4, 0.1, -1.5], dtype=torch.float64)
    return logits, logits.log_softmax(-1), reference.log_softmax(-1)


def expected_gradient(name):
    """The gradient of the estimator as a loss, averaged over every token the policy may draw."""
    logits, log_pi, log_ref = two_policies()
    (log_pi.exp().detach() * kl_penalty(log_pi, log_ref, name)).sum().backward()
    return logits.grad


def exact_gradient(direction):
    logits, log_pi, log_ref = two_policies()
    if direction == "policy to reference":
        (log_pi.exp() * (log_pi - log_ref)).sum().backward()
    else:
        (log_ref.exp() * (log_ref - log_pi)).sum().backward()
    return logits.grad


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kl", 0.5),
        ("k1", 0.5),
        ("abs", 0.5),
        ("mse", 0.125),
        ("k2", 0.125),
        ("low_var_kl", math.exp(-0.5) - 0.5),  # e^-d + d - 1 with d = 0.5
        ("k3", math.exp(-0.5) - 0.5),
    ],
)
def test_values_worked_by_hand(name, value):
    logprob, ref = torch.tensor([-1.0]), torch.tensor([-1.5])
    assert kl_penalty_forward(logprob, ref, name).item() == pytest.approx(value)
    assert kl_penalty(logprob, ref, name).item() == pytest.approx(value)
    assert kl_penalty(logprob, ref, name + "+").item() == pytest.approx(value)


def test_the_sign_is_positive_where_the_policy_likes_a_token_more_than_the_reference():
    more, less = torch.tensor([-1.0]), torch.tensor([-2.0])
    assert kl_penalty(more, less, "k1").item() == 1.0
    assert kl_penalty(less, more, "k1").item() == -1.0
    assert kl_penalty(less, more, "abs").item() == 1.0


@pytest.mark.parametrize("name", EVERY_NAME)
def test_equal_policies_have_no_divergence_and_no_gradient(name):
    logprob = torch.tensor([-0.1, -3.0, -7.5], requires_grad=True)
    for form in (name, name + "+"):
        estimate = kl_penalty(logprob, logprob.detach().clone(), form)
        assert estimate.tolist() == [0.0, 0.0, 0.0]
    if name not in ("kl", "k1"):  # k1 is the log-probability itself: its gradient is 1
        (gradient,) = torch.autograd.grad(
            kl_penalty(logprob, logprob.detach(), name).sum(), logprob
        )
        assert gradient.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("name", ["k1", "k3", "k1+", "k3+"])
def test_k1_and_k3_are_unbiased_estimates_of_the_kl(name):
    _, log_pi, log_ref = two_policies()
    exact = (log_pi.exp() * (log_pi - log_ref)).sum().item()
    estimate = (log_pi.exp() * kl_penalty(log_pi, log_ref, name)).sum().item()
    assert estimate == pytest.approx(exact, rel=1e-12)


def test_k1_in_a_loss_has_no_gradient_in_expectation():
    torch.testing.assert_close(expected_gradient("k1"), torch.zeros(5, dtype=torch.float64))


@pytest.mark.parametrize("name", ["k2", "mse", "k1+", "kl+", "k3+", "low_var_kl+", "abs+", "k2+"])
def test_k2_and_every_plus_form_have_the_gradient_of_the_kl_to_the_reference(name):
    torch.testing.assert_close(expected_gradient(name), exact_gradient("policy to reference"))


def test_k3_in_a_loss_has_the_gradient_of_the_kl_the_other_way_round():
    gradient = expected_gradient("k3")
    torch.testing.assert_close(gradient, exact_gradient("reference to policy"))
    assert not torch.allclose(gradient, exact_gradient("policy to reference"), rtol=0.1)


def test_k1_in_the_reward_has_the_gradient_of_the_kl():
    logits, log_pi, log_ref = two_policies()
    reward_term = kl_penalty(log_pi, log_ref, "k1").detach() * log_pi  # the score function
    (log_pi.exp().detach() * reward_term).sum().backward()
    torch.testing.assert_close(logits.grad, exact_gradient("policy to reference"))


def test_minimising_the_plus_form_moves_the_policy_to_the_reference():
    logits, log_pi, log_ref = two_policies()
    before = (log_pi.exp() * (log_pi - log_ref)).sum().item()
    moved = (logits - 0.5 * expected_gradient("k3+")).log_softmax(-1)
    assert (moved.exp() * (moved - log_ref)).sum().item() < before


@pytest.mark.parametrize("name", EVERY_NAME)
@pytest.mark.parametrize("plus", ["", "+"])
@settings(deadline=None, max_examples=25)
@given(logprob=st.floats(-1e4, 0), ref=st.floats(-1e4, 0))
def test_extreme_ratios_stay_finite_with_their_gradient(name, plus, logprob, ref):
    policy = torch.tensor([logprob], dtype=torch.float32, requires_grad=True)
    estimate = kl_penalty(policy, torch.tensor([ref], dtype=torch.float32), name + plus)
    estimate.sum().backward()
    assert torch.isfinite(estimate).all()
    assert torch.isfinite(policy.grad).all()


def test_k3_is_cut_at_ten_and_never_negative():
    d = torch.tensor([-100.0, -3.0, 0.0, 5.0, 100.0])
    k3 = kl_penalty(d, torch.zeros(5), "k3").tolist()
    assert k3 == pytest.approx([10.0, 10.0, 0.0, math.exp(-5) + 4, 10.0])


def test_full_is_not_implemented_and_an_unknown_name_lists_the_known():
    with pytest.raises(NotImplementedError, match="whole vocabulary"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "full")
    with pytest.raises(ValueError, match=r"'k4'.*k1, abs, mse, k2, low_var_kl, k3"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "k4")


def test_rewards_are_scores_minus_the_weighted_log_ratio():
    rewards = compute_rewards(
        torch.tensor([[0.0, 1.0]]), torch.tensor([[-1.0, -2.0]]), torch.tensor([[-2.0, -1.0]]), 0.1
    )
    assert rewards[0].tolist() == pytest.approx([-0.1, 1.1])


def test_a_fixed_coefficient_stays():
    controller = FixedKLController(kl_coef=0.001)
    controller.update(current_kl=100.0, n_steps=512)
    assert controller.value == 0.001


def test_an_adaptive_coefficient_follows_the_kl_in_bounded_steps():
    controller = AdaptiveKLController(init_kl_coef=0.2, target_kl=6.0, horizon=10000)
    controller.update(current_kl=12.0, n_steps=256)  # error 1, cut to 0.2
    assert controller.value == pytest.approx(0.2 * 1.00512)
    controller.update(current_kl=5.4, n_steps=1000)  # error -0.1
    assert controller.value == pytest.approx(0.2 * 1.00512 * 0.99)
    controller.update(current_kl=0.0, n_steps=1000)  # error -1, cut to -0.2
    assert controller.value == pytest.approx(0.2 * 1.00512 * 0.99 * 0.98)
    controller.update(current_kl=6.0, n_steps=1000)
    assert controller.value == pytest.approx(0.2 * 1.00512 * 0.99 * 0.98)


def test_an_adaptive_coefficient_refuses_a_kl_that_is_no_number():
    controller = AdaptiveKLController(init_kl_coef=0.2, target_kl=6.0, horizon=10000)
    with pytest.raises(ValueError, match="measured KL is nan"):
        controller.update(current_kl=float("nan"), n_steps=1)
    assert controller.value == 0.2


def test_the_config_chooses_the_controller():
    fixed = get_kl_controller(KLControlConfig(type="fixed", kl_coef=0.3))
    assert isinstance(fixed, FixedKLController)
    assert fixed.value == 0.3
    config = KLControlConfig(type="adaptive", kl_coef=0.2, target_kl=6.0, horizon=100)
    adaptive = get_kl_controller(config)
    assert isinstance(adaptive, AdaptiveKLController)
    assert (adaptive.value, adaptive.target, adaptive.horizon) == (0.2, 6.0, 100)


def test_an_unknown_controller_and_an_impossible_horizon_are_refused():
    with pytest.raises(ValueError, match="horizon is 0"):
        AdaptiveKLController(init_kl_coef=0.2, target_kl=6.0, horizon=0)

    class Control:
        type = "pid"

    with pytest.raises(NotImplementedError, match=r"'pid'.*'fixed' or 'adaptive'"):
        get_kl_controller(Control())

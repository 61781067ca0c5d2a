"""Divergences between a student and a teacher, by hand and against autograd."""

import pytest
import torch

from verl.algos import distillation
from verl.algos.distillation import Divergence, logits_gradient
from verl.config import distillation as options

P = torch.tensor([[0.5, 0.5]], dtype=torch.float64).log()
Q = torch.tensor([[0.25, 0.75]], dtype=torch.float64).log()
BY_HAND = {
    ("reverse_kl_full", 0.5): 0.14384103622589042,
    ("forward_kl_full", 0.5): 0.13081203594113694,
    ("jsd", 0.5): 0.033822075568605205,
    ("jsd", 0.1): 0.01183068223924835,
}


def random_log_probs(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 7, dtype=torch.float64, generator=generator).log_softmax(-1)


@pytest.mark.parametrize(("mode", "beta"), BY_HAND)
def test_two_tokens_worked_by_hand(mode, beta):
    value, _ = Divergence(mode=mode, jsd_beta=beta).full(P, Q)
    assert value.item() == pytest.approx(BY_HAND[mode, beta], rel=0, abs=1e-12)


@pytest.mark.parametrize("floor", [None, -2.0])
@pytest.mark.parametrize("mode", distillation.FULL)
def test_the_gradient_in_closed_form_is_that_of_autograd(mode, floor):
    divergence = Divergence(mode=mode, jsd_beta=0.3, min_log_prob=floor)
    logits = random_log_probs(1).mul(3).requires_grad_()
    log_p, log_q = logits.log_softmax(-1), random_log_probs(2).mul(3).log_softmax(-1)
    value, gradient = divergence.full(log_p, log_q)
    (expected,) = torch.autograd.grad(value.sum(), logits)
    found = logits_gradient(log_p, gradient).detach()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("mode", distillation.FULL)
def test_a_student_that_is_its_teacher_has_neither_loss_nor_gradient(mode):
    log_p = random_log_probs(3)
    value, gradient = Divergence(mode=mode).full(log_p, log_p)
    assert value.abs().max() < 1e-15
    assert logits_gradient(log_p, gradient).abs().max() < 1e-15


@pytest.mark.parametrize("mode", ["forward", "reverse"])
def test_the_top_of_a_whole_vocabulary_is_the_exact_divergence(mode):
    log_p, log_q = random_log_probs(1), random_log_probs(2)
    top_log_q, ids = log_q.topk(7)
    found = Divergence(mode=f"{mode}_kl_topk").top_k(log_p.gather(1, ids), top_log_q)
    exact, _ = Divergence(mode=f"{mode}_kl_full").full(log_p, log_q)
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-12)


def test_the_top_one_token_is_its_share_of_the_sum_and_the_rest_is_another():
    forward = Divergence(mode="forward_kl_topk").top_k(P[:, 1:], Q[:, 1:])
    reverse = Divergence(mode="reverse_kl_topk").top_k(P[:, 1:], Q[:, 1:])
    assert forward.item() == pytest.approx(0.3040988310811233, rel=0, abs=1e-12)
    assert reverse.item() == pytest.approx(0.14384103622589042, rel=0, abs=1e-12)


def test_sampled_tokens_have_the_estimates_of_the_kl():
    log_p, log_q = torch.tensor([-1.0, -9.0]).double(), torch.tensor([-2.0, -2.0]).double()
    found = {mode: Divergence(mode=mode).sampled(log_p, log_q) for mode in ("k1", "k2", "k3")}
    assert found["k1"].tolist() == [1.0, -7.0]
    assert found["k2"].tolist() == [0.5, 24.5]
    assert found["k3"][0].item() == pytest.approx(0.36787944117144233, rel=0, abs=1e-12)
    floored = Divergence(mode="k1", min_log_prob=-3.0).sampled(log_p, log_q)
    assert floored.tolist() == [1.0, -1.0]


def test_a_floor_keeps_an_impossible_token_finite():
    log_p, log_q = P, torch.tensor([[0.0, -200.0]]).double()
    value, _ = Divergence(mode="reverse_kl_full", min_log_prob=-10.0).full(log_p, log_q)
    assert value.item() == pytest.approx(5 - 0.6931471805599453, rel=0, abs=1e-12)


def test_the_modes_of_the_configuration_are_those_that_exist():
    assert set(options.SAMPLED_MODES) <= set(distillation.SAMPLED)
    assert options.TOP_K_MODES == distillation.TOP_K
    assert options.FULL_MODES == distillation.FULL

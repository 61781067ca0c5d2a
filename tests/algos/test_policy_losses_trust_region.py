"""DPPO and DRO against numbers worked by hand."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.algos.loss_cases import Batch, actor, loss_of

F64 = torch.float64


def batch(pairs: list[tuple[float, float]], advantages: list[float]) -> Batch:
    """One row; `pairs` are old and new probabilities."""
    old, new = (torch.tensor([list(p)], dtype=F64).log() for p in zip(*pairs, strict=True))
    mask = torch.ones_like(old, dtype=torch.long)
    return Batch(old, new, torch.tensor([advantages], dtype=F64), mask).with_gradient()


def gradient(rows: Batch, case: str, mode: str = "token-mean", **options: Any) -> Tensor:
    """Per token, of the mean."""
    loss, _ = loss_of(rows, actor(case, **options), mode)
    return torch.autograd.grad(loss, rows.log_prob)[0] * rows.log_prob.numel()


BOUNDS = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.2}


def test_total_variation_masks_what_moved_too_far_in_the_direction_of_the_advantage():
    # rises by 0.3 and 0.1, falls by 0.2 and 0.05; then the ones that moved against their advantage
    moves = [(0.2, 0.5), (0.2, 0.3), (0.4, 0.2), (0.4, 0.35), (0.2, 0.5), (0.4, 0.2)]
    advantages = [2.0, 2.0, -1.0, -1.0, -1.0, 2.0]
    rows = batch(moves, advantages)
    expected = [0.0, -2 * 1.5, 0.0, 0.875, 2.5, -2 * 0.5]
    assert gradient(rows, "dppo_tv", **BOUNDS)[0].tolist() == pytest.approx(expected, abs=1e-12)
    _, metrics = loss_of(rows, actor("dppo_tv", **BOUNDS))
    assert metrics["actor/pg_clipfrac"].item() == pytest.approx(2 / 6)
    assert metrics["actor/pg_clipfrac_lower"].item() == pytest.approx(1 / 6)
    distance = (0.3 + 0.1 + 0.2 + 0.05 + 0.3 + 0.2) / 6
    assert metrics["actor/dppo_divergence"].item() == pytest.approx(distance, abs=1e-12)


def test_a_rare_token_may_grow_many_times_over():
    rows = batch([(1e-4, 1e-2)], [1.0])
    assert gradient(rows, "dppo_tv")[0, 0].item() == pytest.approx(-100, rel=1e-9)
    assert gradient(rows, "vanilla")[0, 0].item() == 0


def test_kl_of_one_token_against_all_others():
    old, new = 0.4, 0.2
    divergence = old * math.log(old / new) + 0.6 * math.log(0.6 / 0.8)  # 0.1046
    rows = batch([(old, new)], [-1.0])
    _, metrics = loss_of(rows, actor("dppo_kl"))
    assert metrics["actor/dppo_divergence"].item() == pytest.approx(divergence, abs=1e-12)
    assert gradient(rows, "dppo_kl", clip_ratio_low=0.104)[0, 0].item() == 0
    assert gradient(rows, "dppo_kl", clip_ratio_low=0.105)[0, 0].item() == pytest.approx(0.5)


def test_certain_tokens_have_a_finite_kl():
    rows = Batch(
        torch.tensor([[0.0, -1e-9, -40.0]]),
        torch.tensor([[-1e-9, 0.0, 0.0]]),
        torch.ones(1, 3),
        torch.ones(1, 3, dtype=torch.long),
    )
    loss, metrics = loss_of(rows, actor("dppo_kl"))
    assert loss.isfinite()
    assert all(value.isfinite() for value in metrics.values())


def test_dro_by_hand():
    rows = batch([(0.5, 0.25), (0.5, 0.5)], [1.0, -2.0])
    loss, metrics = loss_of(rows, actor("dro"))  # beta 0.3
    log2 = math.log(2)
    expected = (2 * log2 + 0.15 * log2**2) + (-2 * log2)
    assert loss.item() == pytest.approx(expected / 2, abs=1e-12)
    assert gradient(rows, "dro")[0].tolist() == pytest.approx([-1 - 0.3 * log2, 2], abs=1e-12)
    assert metrics["actor/dro_penalty"].item() == pytest.approx(log2**2 / 4, abs=1e-12)


def test_dro_without_its_weight_is_refused():
    config = actor("dro")
    object.__setattr__(config.policy_loss, "dro_beta", None)
    with pytest.raises(ValueError, match="dro_beta"):
        loss_of(batch([(0.5, 0.5)], [1.0]), config)

"""The three corrections for tokens of older policies, on numbers worked by hand in fp64.

pi_b sampled (several policies within one row), pi_p is the actor before the update, pi is trained.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.algos.loss_cases import Batch, actor, loss_of
from verl.algos.policy_losses.terms import behaviour_metrics
from verl.algos.rollout_correction.apply import (
    apply_bypass_mode,
    compute_rollout_correction_and_add_to_batch,
)
from verl.config.actor import ActorConfig, PolicyLossConfig
from verl.config.algorithm import RolloutCorrectionConfig
from verl.protocol import DataProto

BEHAVE = [[0.5, 0.25, 0.4, 0.5], [0.2, 0.5, 0.5, 1.0]]
PROXIMAL = [[0.5, 0.375, 0.2, 0.1], [0.4, 0.75, 0.5, 1.0]]  # r_p: 1, 1.5, 0.5 | 2, 1.5, 1
CURRENT = [[0.55, 0.375, 0.2, 0.9], [0.4, 0.675, 0.55, 1.0]]  # r: 1.1, 1.5, 0.5 | 2, 1.35, 1.1
MASK = [[1, 1, 1, 0], [1, 1, 1, 0]]
ADVANTAGES = [[1.0, 1.0, 1.0, 7.0], [-1.0, -1.0, -1.0, 7.0]]


def logs(probabilities) -> torch.Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


def gradient(
    correction: RolloutCorrectionConfig | None,
    *,
    loss_mode: str = "vanilla",
    proximal=PROXIMAL,
    current=CURRENT,
    behave=BEHAVE,
) -> torch.Tensor:
    """6 dL / d log pi: that of the whole step, from the batch through the loss; 6 tokens."""
    config = ActorConfig(policy_loss=PolicyLossConfig(loss_mode=loss_mode), clip_ratio=0.2)
    batch = DataProto.from_dict(
        tensors={
            "old_log_probs": logs(proximal),
            "rollout_log_probs": logs(behave),
            "response_mask": torch.tensor(MASK),
        },
        non_tensors={"uid": np.array(["a", "b"], dtype=object)},
    )
    if correction is not None and correction.bypass_mode:
        apply_bypass_mode(batch, correction, config.policy_loss)
    elif correction is not None:
        batch, _ = compute_rollout_correction_and_add_to_batch(batch, correction)
    tensors = Batch(
        batch.batch["old_log_probs"],
        logs(current).requires_grad_(),
        torch.tensor(ADVANTAGES, dtype=torch.float64),
        batch.batch["response_mask"],
    )
    weights = batch.batch.get("rollout_is_weights", None)
    loss, _ = loss_of(tensors, config, rollout_is_weights=weights)
    return 6 * torch.autograd.grad(loss, tensors.log_prob)[0][:, :3]


SEQUENCE = RolloutCorrectionConfig.bypass_pg_is(2.0)
TOKEN = replace(SEQUENCE, rollout_is="token", rollout_is_threshold=1.25)
CLIP = RolloutCorrectionConfig.bypass_ppo_clip()
HAND = {
    # -A r, 0 where the clip at 0.8 and 1.2 took over.
    "token, clipped": (CLIP, "vanilla", [[-1.1, 0, -0.5], [2, 1.35, 1.1]]),
    # -A min(r, 1.25)
    "token, truncated": (TOKEN, "vanilla", [[-1.1, -1.25, -0.5], [1.25, 1.25, 1.1]]),
    # prod r: 0.825 and 2.97, which is cut at 2
    "sequence": (SEQUENCE, "vanilla", [[-0.825] * 3, [2.0] * 3]),
    # The geometric mean of r is 0.825^(1/3) and 2.97^(1/3) = 1.44: the second leaves.
    "sequence, rejected": (
        RolloutCorrectionConfig.bypass_ppo_clip_geo_rs("0.8_1.25"),
        "vanilla",
        [[-1.1, 0, -0.5], [0, 0, 0]],
    ),
    # pi / pi_p is 1.1, 1, 1 | 1, 0.9, 1.1, nothing is clipped; weights r_p cut at 1.6.
    "decoupled": (
        RolloutCorrectionConfig.decoupled_token_is(1.6),
        "vanilla",
        [[-1.1, -1.5, -0.5], [1.6, 0.9 * 1.5, 1.1]],
    ),
    # prod r_p: 0.75 and 3, which is cut at 2
    "decoupled, sequence": (
        RolloutCorrectionConfig.decoupled_seq_is(2.0),
        "vanilla",
        [[-1.1 * 0.75, -0.75, -0.75], [2, 0.9 * 2, 1.1 * 2]],
    ),
    # -A clip(r): the weight keeps its gradient
    "token, cispo": (CLIP, "cispo", [[-1.1, -1.2, -0.8], [1.2, 1.2, 1.1]]),
    # s = (prod r)^(1/3) for every token, tokens weigh 1/3 of 1/2; 1.44 is above the clip, A < 0.
    "token, gspo": (CLIP, "gspo", [[-(0.825 ** (1 / 3))] * 3, [2.97 ** (1 / 3)] * 3]),
    # Bounds are on log r: 0.2 above for A > 0, -0.2 below for A < 0; no gradient beyond them.
    "token, geo_mean": (
        CLIP,
        "geo_mean",
        [
            [-math.exp((math.log(1.1) + 0.2 + math.log(0.5)) / 3) * k for k in (1, 0, 1)],
            [2.97 ** (1 / 3)] * 3,
        ],
    ),
}


@pytest.mark.parametrize(("correction", "loss_mode", "expected"), HAND.values(), ids=HAND)
def test_gradients_by_hand(correction, loss_mode, expected):
    found = gradient(correction, loss_mode=loss_mode)
    torch.testing.assert_close(
        found, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize(("correction", "loss_mode", "_"), HAND.values(), ids=HAND)
def test_with_one_version_every_choice_is_plain_ppo(correction, loss_mode, _):
    """All three policies are one: ratios and weights are 1, whatever multiplies them."""
    same = {"proximal": BEHAVE, "current": BEHAVE}
    plain = gradient(None, **same)
    assert plain.tolist() == [[-1.0] * 3, [1.0] * 3]
    found = gradient(correction, loss_mode=loss_mode, **same)
    torch.testing.assert_close(found, plain, rtol=0, atol=1e-15)


def test_recomputed_log_probs_without_weights_would_be_another_gradient():
    """The trap: the actor's log-probs taken for those of the policy that sampled."""
    trapped = gradient(None)
    decoupled = gradient(RolloutCorrectionConfig.decoupled_token_is(1e6))
    assert (trapped - decoupled).abs().max() > 0.5


def test_the_proximal_policy_is_the_anchor_whatever_the_mini_batch():
    """Old log-probs and weights are fixed before the first mini-batch: only pi moves."""
    settings_ = RolloutCorrectionConfig.decoupled_token_is(1e6)
    first = gradient(settings_, current=PROXIMAL)
    ratio = torch.tensor(PROXIMAL, dtype=torch.float64) / torch.tensor(BEHAVE, dtype=torch.float64)
    sign = torch.tensor([[-1.0], [1.0]], dtype=torch.float64)
    torch.testing.assert_close(first, (sign * ratio)[:, :3], rtol=0, atol=1e-12)
    later = gradient(settings_)
    moved = torch.tensor([[1.1, 1, 1], [1, 0.9, 1.1]], dtype=torch.float64)
    torch.testing.assert_close(later, first * moved, rtol=0, atol=1e-12)


def test_the_distance_to_the_sampling_policy_is_reported_of_trained_tokens():
    metrics = behaviour_metrics(
        logs(CURRENT), logs(BEHAVE), torch.tensor(MASK), actor(clip_ratio=0.2)
    )
    ratios = [1.1, 1.5, 0.5, 2.0, 1.35, 1.1]
    kl = sum(r - 1 - math.log(r) for r in ratios) / 6
    assert metrics["actor/behaviour_clipfrac"].item() == pytest.approx(4 / 6)
    assert metrics["actor/behaviour_kl"].item() == pytest.approx(kl)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    level=st.sampled_from(["token", "sequence"]),
    cap=st.floats(0.1, 20.0),
    scale=st.floats(0.0, 40.0),
)
def test_weights_never_exceed_the_cap_and_masked_tokens_never_count(seed, level, cap, scale):
    generator = torch.Generator().manual_seed(seed)
    log_ratio = scale * torch.randn(4, 6, generator=generator, dtype=torch.float64)
    mask = (torch.rand(4, 6, generator=generator) < 0.6).long()
    correction = RolloutCorrectionConfig(rollout_is=level, rollout_is_threshold=cap)

    def weights(outside: float) -> torch.Tensor:
        old = torch.where(mask.bool(), log_ratio, outside)
        batch = DataProto.from_dict(
            tensors={
                "old_log_probs": old,
                "rollout_log_probs": torch.zeros_like(old),
                "response_mask": mask,
            }
        )
        batch, _ = compute_rollout_correction_and_add_to_batch(batch, correction)
        return batch.batch["rollout_is_weights"]

    found = weights(0.0)
    assert (found <= cap).all()
    assert (found[mask == 0] == 0).all()
    assert (found[mask == 1] > 0).all()
    assert torch.equal(found, weights(math.nan))

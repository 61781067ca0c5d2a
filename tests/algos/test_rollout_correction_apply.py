import pytest
import torch
from omegaconf import OmegaConf

from tests.algos.loss_cases import actor
from verl.algos.registry import get_policy_loss_fn
from verl.config.actor import PolicyLossConfig
from verl.config.algorithm import RolloutCorrectionConfig
from verl.protocol import DataProto
from verl.trainer.ppo.rollout_corr_helper import (
    apply_bypass_mode,
    compute_rollout_correction_and_add_to_batch,
    compute_rollout_correction_and_rejection_mask,
)

RATIOS = torch.tensor([[1.5, 1.0, 4.0], [0.5, 0.9, 1.0]]).log()
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])
ROLLOUT = torch.full((2, 3), -1.0)


def batch() -> DataProto:
    return DataProto.from_dict(
        tensors={
            "old_log_probs": ROLLOUT + RATIOS,
            "rollout_log_probs": ROLLOUT.clone(),
            "response_mask": MASK.clone(),
        }
    )


def test_weights_and_rejection_come_with_metrics_of_both():
    weights, mask, metrics = compute_rollout_correction_and_rejection_mask(
        ROLLOUT + RATIOS,
        ROLLOUT,
        MASK,
        rollout_is="token",
        rollout_is_threshold=2.0,
        rollout_rs="token_k1",
        rollout_rs_threshold="0.6_3.0",
    )
    expected = torch.tensor([[1.5, 1.0, 2.0], [0.5, 0.9, 0.0]])
    torch.testing.assert_close(weights.batch["rollout_is_weights"], expected)
    assert mask.tolist() == [[1, 1, 0], [0, 1, 0]]
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(2 / 5)
    assert metrics["rollout_corr/rollout_is_max"] == pytest.approx(4.0)
    assert "rollout_corr/kl" in metrics


def test_without_options_only_metrics_come_back():
    weights, mask, metrics = compute_rollout_correction_and_rejection_mask(
        ROLLOUT + RATIOS, ROLLOUT, MASK
    )
    assert weights is None
    assert torch.equal(mask, MASK)
    assert not any("rollout_is" in name or "rollout_rs" in name for name in metrics)


def test_the_batch_gets_weights_and_the_mask_that_is_left():
    config = RolloutCorrectionConfig.decoupled_seq_is_rs(2.0, "0.4_5.0")  # products 6 and 0.45
    corrected, metrics = compute_rollout_correction_and_add_to_batch(batch(), config)
    assert corrected.batch["response_mask"].tolist() == [[0, 0, 0], [1, 1, 0]]
    expected = torch.tensor([[2.0, 2.0, 2.0], [0.45, 0.45, 0.0]])
    torch.testing.assert_close(corrected.batch["rollout_is_weights"], expected)
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == 0.5


def test_disabled_correction_changes_nothing_but_measures():
    before = batch()
    after, metrics = compute_rollout_correction_and_add_to_batch(
        before, RolloutCorrectionConfig.disabled()
    )
    assert set(after.batch.keys()) == {"old_log_probs", "rollout_log_probs", "response_mask"}
    assert torch.equal(after.batch["response_mask"], MASK)
    assert "rollout_corr/k3_kl" in metrics


def test_missing_rollout_log_probs_are_named_with_the_option_that_records_them():
    without = batch()
    without.pop(batch_keys=["rollout_log_probs"])
    with pytest.raises(ValueError, match=r"rollout\.calculate_log_probs=True"):
        compute_rollout_correction_and_add_to_batch(without, RolloutCorrectionConfig.disabled())


def test_bypass_mode_takes_the_rollouts_log_probs_and_chooses_its_loss():
    bypassed, policy_loss = batch(), PolicyLossConfig()
    correction = RolloutCorrectionConfig.bypass_pg_is()
    apply_bypass_mode(bypassed, correction, policy_loss)
    assert torch.equal(bypassed.batch["old_log_probs"], ROLLOUT)
    assert policy_loss.loss_mode == "bypass_mode"
    assert policy_loss.rollout_correction is correction


def test_bypass_mode_may_be_written_into_a_composed_configuration():
    composed = OmegaConf.create({"loss_mode": "vanilla"})
    OmegaConf.set_struct(composed, True)
    correction = OmegaConf.create({"bypass_mode": True, "loss_type": "reinforce"})
    apply_bypass_mode(batch(), correction, composed)
    assert composed.loss_mode == "bypass_mode"
    assert composed.rollout_correction.loss_type == "reinforce"


def test_a_bypassed_configuration_can_be_trained_with():
    config = actor()
    bypassed = batch()
    apply_bypass_mode(bypassed, RolloutCorrectionConfig.bypass_pg_is(), config.policy_loss)
    loss, metrics = get_policy_loss_fn(config.policy_loss.loss_mode)(
        old_log_prob=bypassed.batch["old_log_probs"],
        log_prob=ROLLOUT + RATIOS,
        advantages=torch.ones(2, 3),
        response_mask=MASK,
        loss_agg_mode="token-mean",
        config=config,
        rollout_is_weights=None,
    )
    assert loss.isfinite()
    assert metrics["rollout_corr/rollout_is_seq_max"] == pytest.approx(6.0)

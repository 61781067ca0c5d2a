"""Corrections in an asynchronous run: whose log-probs are compared, and what is refused."""

import pytest
import torch

from tests.toy import toy_run
from tests.trainer.test_asynchronous import colocated
from verl.protocol.padded import POLICY_VERSIONS
from verl.trainer.ppo.asynchronous import AsyncTrainer
from verl.utils.metric.declared import declared_metric

CORRECTION = "algorithm.rollout_correction"


class Keeps(AsyncTrainer):
    """Keeps the columns of each step after credit is assigned."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.kept = []

    def assign_credit(self, batch, step):
        version = self.actor_rollout_wg.trained_version()[0]
        batch = super().assign_credit(batch, step)
        mask = batch.batch["response_mask"].bool()
        names = (POLICY_VERSIONS, "old_log_probs", "rollout_log_probs", "rollout_is_weights")
        columns = {name: batch.batch[name][mask] for name in names}
        columns["age"] = version - columns.pop(POLICY_VERSIONS)
        self.kept.append(columns)
        return batch


def test_old_log_probs_are_the_actors_and_weights_lead_back_to_the_policy_that_sampled(
    toy, tmp_path
):
    steps, trainer = toy_run(
        toy,
        tmp_path,
        *colocated(2, tmp_path),
        f"{CORRECTION}.bypass_mode=false",
        f"{CORRECTION}.rollout_is=token",
        f"{CORRECTION}.rollout_is_threshold=1.001",
        "trainer.total_training_steps=4",
        trainer_class=Keeps,
    )
    kept = {name: torch.cat([step[name] for step in trainer.kept]) for name in trainer.kept[0]}
    is_current = kept["age"] == 0
    assert is_current.any()
    assert (kept["age"] > 0).any()
    drift = kept["old_log_probs"] - kept["rollout_log_probs"]
    # In exact mode the actor finds the very numbers of its own tokens, and others for older ones.
    assert (drift[is_current] == 0).all()
    assert (drift[~is_current] != 0).any()
    weights = kept["rollout_is_weights"]
    torch.testing.assert_close(weights, drift.exp().clamp(max=1.001), rtol=1e-6, atol=0)
    assert weights.max() <= 1.001
    assert steps[-1]["actor/behaviour_kl"] > 0
    assert steps[0]["training/old_log_prob_pass_skipped"] == 1  # all tokens are of this policy
    assert steps[-1]["training/old_log_prob_pass_skipped"] == 0
    # Rollout and training are compared on tokens that one policy sampled and scored.
    assert steps[-1].get("training/rollout_probs_diff_max", 0) == 0
    names = {name for step in steps for name in step} - {"step"}
    assert sorted(name for name in names if declared_metric(name) is None) == []


def test_a_run_without_a_choice_is_refused_before_a_model_is_loaded(toy, tmp_path):
    with pytest.raises(ValueError, match=r"needs a correction.*\n  token .*") as refusal:
        toy_run(
            toy,
            tmp_path,
            *colocated(2, tmp_path),
            f"{CORRECTION}.bypass_mode=false",
            "actor_rollout_ref.model.path=/no/such/model",
            trainer_class=AsyncTrainer,
        )
    assert "decoupled" in str(refusal.value)

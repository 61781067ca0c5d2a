"""Every metric that a run reports is declared: name, unit, how its parts combine, one sentence."""

from tests.toy import ACTOR, toy_run
from verl.utils.metric.declared import declared_metric


def undeclared(steps):
    names = {name for step in steps for name in step} - {"step"}
    return sorted(name for name in names if declared_metric(name) is None)


def test_a_run_with_a_critic_and_a_reference_reports_declared_metrics_only(toy, tmp_path):
    steps, _ = toy_run(
        toy,
        tmp_path / "ppo",
        "algorithm.adv_estimator=gae",
        "algorithm.use_kl_in_reward=true",
        f"{ACTOR}.entropy_coeff=0.01",
        "trainer.val_before_train=true",
    )
    assert undeclared(steps) == []


def test_a_corrected_run_reports_declared_metrics_only(toy, tmp_path):
    steps, _ = toy_run(
        toy,
        tmp_path / "corrected",
        f"{ACTOR}.use_kl_loss=true",
        "algorithm.rollout_correction.rollout_is=token",
        "algorithm.rollout_correction.rollout_rs=seq_mean_k3",
        "algorithm.rollout_correction.rollout_rs_threshold=2.0",
    )
    assert undeclared(steps) == []

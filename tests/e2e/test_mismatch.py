"""An engine that disagrees with the trainer: the disagreement is seen, measured and repaired.

The engine rounds its weights to 4 bits and plays a game that is known exactly (`bandit`). Every
estimate goes the whole way: tokens from the engine's process, correction, loss, optimizer step.
"""

import pytest
import torch

import tests.e2e.rounded_rollout  # noqa: F401 - registers rollout.name=rounded
from tests.e2e.bandit import NUM_ESTIMATES, VOCABULARY, Bandit
from tests.toy import ROLLOUT, make_toy, toy_run
from tests.workers.rollout.mismatched import rounded
from verl.algos.rollout_correction import compute_offpolicy_metrics
from verl.config.algorithm import RolloutCorrectionConfig
from verl.protocol import DataProto
from verl.single_controller import WorkerError
from verl.trainer.ppo.metric_utils import calculate_debug_metrics
from verl.workers.rollout.probe import (
    METRIC,
    EngineProbeError,
    FixedPromptCheck,
    SamplingInUse,
    StaleEngineError,
    probe_engine,
)
from verl.workers.rollout.trained import LocalPolicy

NO_LIMIT = 1e3
BAND = {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"}
BYPASS = {"bypass_mode": True, "loss_type": "reinforce"}


@pytest.fixture(scope="module")
def bandit(tmp_path_factory):
    game = Bandit(tmp_path_factory.mktemp("bandit"))
    try:
        yield game
    finally:
        game.process.close()


def correction(rollout_is=None, **options):
    return RolloutCorrectionConfig(rollout_is=rollout_is, **options)


def mean_and_error(bandit, chosen):
    shares = bandit.estimates(chosen)
    return float(shares.mean()), float(shares.std()) / NUM_ESTIMATES**0.5


def test_weights_are_rounded_to_as_many_values_as_the_bits_can_name():
    weight = torch.tensor([-1.0, -0.4, 0.1, 0.3, 0.7])
    expected = [-1.0, -1 / 3, 0.0, 1 / 3, 2 / 3]
    torch.testing.assert_close(rounded(weight, 3), torch.tensor(expected))


def test_the_measured_divergence_is_the_true_one(bandit):
    rollout, trained = bandit.rollout_log_probs, bandit.all_rows["old_log_probs"]
    exact = float((rollout.sum(1).exp() * (rollout - trained).mean(1)).sum())
    played = bandit.played
    found = compute_offpolicy_metrics(
        played["old_log_probs"], played["rollout_log_probs"], played["response_mask"]
    )
    per_token = (played["rollout_log_probs"] - played["old_log_probs"]).mean(1)
    error = float(per_token.std()) / len(per_token) ** 0.5
    assert exact > 0.1
    assert abs(found["kl"] - exact) < 3 * error


def test_the_trainer_reports_how_far_the_engine_is_off(bandit):
    metrics = calculate_debug_metrics(DataProto(batch=bandit.played))
    rollout = bandit.played["rollout_log_probs"].exp()
    difference = (rollout - bandit.played["old_log_probs"].exp()).abs()
    assert metrics["training/rollout_probs_diff_mean"] == pytest.approx(float(difference.mean()))
    assert metrics["training/rollout_probs_diff_mean"] > 0.05
    assert metrics["training/rollout_probs_diff_max"] > 0.3


def test_without_correction_more_than_half_of_the_gradient_is_missing(bandit):
    mean, error = mean_and_error(bandit, correction())
    exact = bandit.share(bandit.exact_gradient(bandit.rollout_log_probs.sum(1).exp()))
    assert 0.4 < exact < 0.5
    assert abs(mean - exact) < 2 * error
    assert mean < 1 - 10 * error


@pytest.mark.parametrize(
    "chosen",
    [
        correction("sequence", rollout_is_threshold=NO_LIMIT),
        correction("sequence", rollout_is_threshold=NO_LIMIT, rollout_is_batch_normalize=True),
        correction("sequence", rollout_is_threshold=NO_LIMIT, **BYPASS),
    ],
    ids=["decoupled", "normalised", "bypass"],
)
def test_sequence_weights_make_the_gradient_whole(bandit, chosen):
    mean, error = mean_and_error(bandit, chosen)
    assert abs(mean - 1) < 2 * error < 0.25


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (correction("token", rollout_is_threshold=NO_LIMIT), 0.94),
        (correction("token", rollout_is_threshold=NO_LIMIT, **BYPASS), 0.94),
        (correction("sequence", rollout_is_threshold=2.0), 0.65),
        (correction(**BAND), 0.76),
        (correction("sequence", rollout_is_threshold=NO_LIMIT, **BAND), 0.88),
    ],
    ids=["token", "token, bypass", "truncated", "rejection", "rejection and weights"],
)
def test_less_variance_is_paid_for_with_some_of_the_gradient(bandit, chosen, expected):
    mean, error = mean_and_error(bandit, chosen)
    assert mean == pytest.approx(expected, abs=0.02)
    assert error < 0.06  # of the whole gradient it is 0.1


@pytest.mark.slow
def test_weights_let_training_arrive_where_the_exact_gradient_does(bandit):
    exact = bandit.learn(None, num_steps=20)
    uncorrected = bandit.learn(correction(), num_steps=20)
    assert exact[-1] > 0.95
    assert max(uncorrected) < 0.6
    for level in ("token", "sequence"):
        chosen = correction(level, rollout_is_threshold=NO_LIMIT)
        assert bandit.learn(chosen, num_steps=20)[-1] == pytest.approx(exact[-1], abs=0.01)


def test_probe_and_drift_check_tell_such_an_engine_from_one_that_rounds_as_it_should(bandit):
    policy = LocalPolicy(bandit.training, bandit.process.update_weights)
    with pytest.raises(EngineProbeError, match="reaches every tensor"):
        probe_engine(
            bandit.process,
            policy,
            bandit.process.facts,
            vocabulary=VOCABULARY,
            tolerance=0.05,
            sampling=SamplingInUse(),
        )
    length = bandit.process.facts.max_model_len
    with pytest.raises(StaleEngineError, match="differ by up to"):
        FixedPromptCheck(vocabulary=VOCABULARY, max_model_len=length, tolerance=0.05).check(
            bandit.process, policy
        )
    accepted = FixedPromptCheck(vocabulary=VOCABULARY, max_model_len=length, tolerance=5.0)
    assert 0.05 < accepted.check(bandit.process, policy)[METRIC] < 5


ROUNDED = [
    f"{ROLLOUT}.name=rounded",
    f"{ROLLOUT}.custom.bits=6",
    f"{ROLLOUT}.calculate_log_probs=true",
]


@pytest.mark.slow
def test_a_whole_run_reports_the_mismatch_and_the_weights_that_repair_it(tmp_path):
    toy = make_toy(tmp_path)
    accepted = [f"{ROLLOUT}.probe=false", f"{ROLLOUT}.canary_tolerance=10"]
    steps, trainer = toy_run(
        toy, tmp_path, *ROUNDED, *accepted, "algorithm.rollout_correction.rollout_is=token"
    )
    trainer.actor_rollout_wg.workers[0].stop_rollout()
    assert len(steps) == 2
    for metrics in steps:
        assert metrics["training/rollout_probs_diff_mean"] > 1e-3
        assert metrics["rollout_corr/kl"] > 1e-3
        assert 0.01 < metrics[METRIC] < 10
        assert 0.8 < metrics["rollout_corr/rollout_is_mean"] < 1.2


@pytest.mark.slow
def test_a_run_that_did_not_ask_for_such_an_engine_stops_before_the_first_step(tmp_path):
    with pytest.raises(WorkerError, match="reaches every tensor"):
        toy_run(make_toy(tmp_path), tmp_path, *ROUNDED)

"""PF-PPO's replay buffer: older responses take part, corrected, and a resumed run has them too."""

import numpy as np
import pytest
import torch

from tests.toy import toy_run, weights
from verl.agent_loop.buffer import OnPolicy
from verl.config.faults import ConfigError
from verl.protocol import DataProto
from verl.trainer.recipes.pf_ppo import ReplayBuffer, ReplayTrainer

SETTINGS = [
    "trainer.recipe=pf_ppo",
    "algorithm.adv_estimator=gae",
    "algorithm.use_pf_ppo=true",
    "algorithm.pf_ppo.replay_size=24",
    "algorithm.rollout_correction.rollout_is=token",
    "data.max_response_length=4",
]


def replay_run(toy, output, *changes):
    changes = (*SETTINGS, f"custom_reward_function.path={toy / 'parity.py'}", *changes)
    return toy_run(toy, output, *changes, trainer_class=ReplayTrainer)


def rows_of(*numbers):
    column = np.array([f"1-{number}" for number in numbers], dtype=object)
    return DataProto.from_dict(
        tensors={"scores": torch.tensor(numbers)}, non_tensors={"uid": column}
    )


def test_the_oldest_rows_beyond_the_size_are_forgotten():
    buffer = ReplayBuffer(OnPolicy(2), size=3)
    buffer.keep(rows_of(1, 2))
    buffer.keep(rows_of(3, 4))
    assert buffer.rows is not None
    assert buffer.rows.batch["scores"].tolist() == [2, 3, 4]
    other = ReplayBuffer(OnPolicy(2), size=3)
    other.load_state_dict(buffer.state_dict())
    assert other.rows is not None
    assert other.rows.batch["scores"].tolist() == [2, 3, 4]
    assert other.rows.non_tensor_batch["uid"].tolist() == ["1-2", "1-3", "1-4"]


def test_steps_whose_loops_report_other_columns_are_remembered_together():
    """A conversation forks in some step: only from then on rows say whose session they are."""
    buffer = ReplayBuffer(OnPolicy(2), size=4)
    buffer.keep(rows_of(1, 2))
    forked = rows_of(3, 4, 5)
    forked.non_tensor_batch["session_uid"] = np.array(["a", "a", "b"], dtype=object)
    forked.non_tensor_batch["fork_reasons"] = np.array([{}, {}, {}], dtype=object)
    buffer.keep(forked)
    buffer.keep(rows_of(6))
    assert buffer.rows is not None
    assert buffer.rows.batch["scores"].tolist() == [2, 3, 4, 5, 6]
    assert buffer.rows.non_tensor_batch["fork_reasons"].tolist() == [None, {}, {}, {}, None]
    assert len(set(buffer.rows.non_tensor_batch["session_uid"])) == 4


@pytest.mark.slow
def test_older_responses_are_drawn_with_the_log_probs_they_were_sampled_with(toy, tmp_path):
    straight, whole = replay_run(toy, tmp_path / "whole", "trainer.total_training_steps=4")
    assert straight[0]["training/replayed_ratio"] == 0.0
    assert all(0 < step["training/replayed_ratio"] < 1 for step in straight[1:])
    assert len(whole.batch) == 16, "as many as were sampled"
    columns = whole.batch.batch
    is_trained = columns["response_mask"].bool()
    versions = columns["policy_versions"].where(is_trained, -1).max(-1).values
    assert versions.min() < versions.max(), "several policies"
    drift = (columns["old_log_probs"] - columns["rollout_log_probs"]).abs().where(is_trained, 0.0)
    is_old = versions < versions.max()
    assert drift[is_old].max() > 1e-3, "the log-probs of sampling stay those of sampling"
    assert drift[~is_old].max() < 1e-4

    save = ["trainer.save_freq=2", "trainer.total_training_steps=2"]
    replay_run(toy, tmp_path / "parts", *save)
    save[1] = "trainer.total_training_steps=4"
    resumed, parts = replay_run(toy, tmp_path / "parts", *save)
    assert [step["training/replayed_ratio"] for step in resumed] == [
        step["training/replayed_ratio"] for step in straight[2:]
    ]
    pairs = zip(weights(whole).values(), weights(parts).values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs), "a resumed run is the run that did not stop"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("algorithm.rollout_correction.rollout_is=null", "no correction for them is chosen"),
        ("algorithm.pf_ppo.replay_size=0", "a size above 0"),
        ("algorithm.use_pf_ppo=false", "set use_pf_ppo=True"),
    ],
)
def test_a_run_that_could_not_replay_is_refused(toy, tmp_path, change, said):
    with pytest.raises(ConfigError, match=said):
        replay_run(toy, tmp_path, change)

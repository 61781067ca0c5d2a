"""A run that stops, for whatever reason, and continues is the run that did not stop."""

import json
import logging
import os
import random
import signal

import numpy as np
import pytest
import torch

from tests.toy import ACTOR, REWARD, make_toy, toy_run, weights
from verl.config.trainer import TrainerConfig
from verl.protocol import DataProto
from verl.trainer.ppo import checkpointing
from verl.trainer.ppo.checkpointing import RunState, run_locks
from verl.trainer.ppo.trainer import PPOTrainer
from verl.trainer.ppo.tripwires import TooManyBadSteps
from verl.utils.checkpoint.layout import CheckpointMismatchError
from verl.utils.device import seed_everything
from verl.utils.scramble import keyed_seed

PPO = [
    "algorithm.adv_estimator=gae",
    "algorithm.use_kl_in_reward=true",
    "algorithm.kl_ctrl.type=adaptive",
    f"{ACTOR}.policy_loss.loss_mode=clip_cov",  # draws random numbers
    f"{ACTOR}.optim.lr_scheduler_type=cosine",
]


def steady(metrics):
    """What must not differ: everything but the time it took and the memory."""
    return {
        name: value for name, value in metrics.items() if not name.startswith(("timing", "perf/"))
    }


def same_weights(one, other) -> bool:
    pairs = zip(weights(one).values(), weights(other).values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


class StopsAfter(PPOTrainer):
    """Asks itself to stop, as a scheduler would, in the middle of a step."""

    stop_at = 2

    def annotate(self, batch, step):
        if self.global_steps == self.stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().annotate(batch, step)


@pytest.fixture(scope="module")
def straight(toy, tmp_path_factory):
    output = tmp_path_factory.mktemp("straight")
    return toy_run(toy, output, *PPO, "trainer.total_training_steps=8")


def test_two_runs_of_one_configuration_are_the_same_run(toy, tmp_path, straight):
    metrics, trainer = toy_run(toy, tmp_path, *PPO, "trainer.total_training_steps=8")
    assert [steady(step) for step in metrics] == [steady(step) for step in straight[0]]
    assert same_weights(trainer, straight[1])


def test_what_users_code_draws_depends_on_the_step_alone(toy, tmp_path):
    class Draws(PPOTrainer):
        def score(self, batch, step):
            drawn = float(torch.rand(())) + random.random() + np.random.rand()
            step.report.add("drawn", drawn)
            return super().score(batch, step)

    runs = []
    for ambient in (1, 2):
        seed_everything(ambient)
        runs.append([step["drawn"] for step in toy_run(toy, tmp_path, trainer_class=Draws)[0]])
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]


def test_another_seed_is_another_run(toy, tmp_path, straight):
    metrics, _ = toy_run(toy, tmp_path, *PPO, "data.seed=2")
    assert steady(metrics[0]) != steady(straight[0][0])


@pytest.mark.parametrize("stop_at", [2, 6])  # 6 is the end of an epoch
def test_a_run_that_was_asked_to_stop_continues_bit_for_bit(
    toy, tmp_path, straight, stop_at, capsys
):
    changes = [*PPO, "trainer.total_training_steps=8", "trainer.save_freq=100"]
    stopping = type("Stops", (StopsAfter,), {"stop_at": stop_at})
    first, _ = toy_run(toy, tmp_path, *changes, trainer_class=stopping)
    assert [step["step"] for step in first] == list(range(1, stop_at + 1))
    assert f"COMMITTED step={stop_at}\n" in capsys.readouterr().out
    second, trainer = toy_run(toy, tmp_path, *changes)
    assert [step["step"] for step in second] == list(range(stop_at + 1, 9))
    assert [steady(step) for step in first + second] == [steady(step) for step in straight[0]]
    assert same_weights(trainer, straight[1])


def test_steps_are_saved_at_intervals_and_at_the_end_and_the_oldest_go(toy, tmp_path, capsys):
    changes = [
        "trainer.save_freq=2",
        "trainer.total_training_steps=5",
        "trainer.max_actor_ckpt_to_keep=2",
    ]
    toy_run(toy, tmp_path, *changes)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("COMMITTED")]
    assert lines == ["COMMITTED step=2", "COMMITTED step=4", "COMMITTED step=5"]
    folder = tmp_path / "checkpoints"
    assert sorted(path.name for path in folder.glob("global_step_*")) == [
        "global_step_4",
        "global_step_5",
    ]
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == "5"


def test_a_finished_run_has_nothing_left_to_do_and_says_so(toy, tmp_path, caplog):
    _, trained = toy_run(toy, tmp_path, "trainer.save_freq=2")
    assert "nothing is left to train" not in caplog.text
    metrics, again = toy_run(toy, tmp_path, "trainer.save_freq=2")
    assert "nothing is left to train: step 2 is saved and the run has 2" in caplog.text
    assert metrics == []
    assert again.global_steps == 2
    assert same_weights(trained, again)


def test_a_folder_is_locked_by_a_run_that_saves_nothing_and_has_a_page():
    folder = "trainer.default_local_dir"
    assert folder not in run_locks(TrainerConfig(save_freq=-1))
    assert folder in run_locks(TrainerConfig(save_freq=-1, board=True))


def test_resuming_can_be_turned_off_or_told_where_to_start(toy, tmp_path):
    changes = ["trainer.save_freq=1", "trainer.total_training_steps=3"]
    toy_run(toy, tmp_path, *changes)
    afresh, _ = toy_run(
        toy, tmp_path, "trainer.resume_mode=disable", "trainer.total_training_steps=1"
    )
    assert [step["step"] for step in afresh] == [1]
    named = f"trainer.resume_from_path={tmp_path / 'checkpoints' / 'global_step_2'}"
    metrics, _ = toy_run(toy, tmp_path, *changes, "trainer.resume_mode=resume_path", named)
    assert [step["step"] for step in metrics] == [3]


def test_another_configuration_does_not_continue_the_run(toy, tmp_path):
    toy_run(toy, tmp_path, "trainer.save_freq=1", "trainer.total_training_steps=1")
    with pytest.raises(CheckpointMismatchError, match=r"actor\.optim\.lr was 0\.01 and is 0\.5"):
        toy_run(toy, tmp_path, f"{ACTOR}.optim.lr=0.5")


def test_a_step_with_values_that_are_not_finite_is_left_out_and_kept(toy, tmp_path):
    class Breaks(PPOTrainer):
        def _with_old_log_probs(self, batch, step):
            self.before = weights(self)
            batch = super()._with_old_log_probs(batch, step)
            if self.global_steps == 2:
                batch.batch["old_log_probs"][0, 0] = float("nan")
            return batch

        def finish_step(self, batch, step):
            if self.global_steps == 2:
                pairs = zip(self.before.values(), weights(self).values(), strict=True)
                assert all(torch.equal(a, b) for a, b in pairs)
            super().finish_step(batch, step)

    metrics, trainer = toy_run(
        toy, tmp_path, "trainer.total_training_steps=3", trainer_class=Breaks
    )
    assert [step.get("tripwire/non_finite") for step in metrics] == [None, 1.0, 1.0]
    assert "actor/pg_loss" not in metrics[1]
    assert "actor/pg_loss" in metrics[2]
    assert all(torch.isfinite(tensor).all() for tensor in weights(trainer).values())
    kept = tmp_path / "checkpoints" / "left_out_batches" / "step_2.safetensors"
    assert torch.isnan(DataProto.load_from_disk(kept).batch["old_log_probs"]).any()


def test_three_steps_in_a_row_that_are_not_finite_end_the_run(toy, tmp_path):
    class Broken(PPOTrainer):
        def _with_old_log_probs(self, batch, step):
            batch = super()._with_old_log_probs(batch, step)
            batch.batch["old_log_probs"][:] = float("inf")
            return batch

    with pytest.raises(TooManyBadSteps, match="3 steps in a row"):
        toy_run(toy, tmp_path, "trainer.total_training_steps=5", trainer_class=Broken)


# ---- the parts -----------------------------------------------------------------------------------


def test_a_seed_belongs_to_its_key_alone():
    keys = [
        (1, "training", 2, "2-0", 0),
        (1, "training", 2, "2-0", 1),
        (1, "training", 22, "-0", 0),
    ]
    assert len({keyed_seed(*key) for key in keys}) == 3
    assert keyed_seed(1, "a") == keyed_seed(1, "a")
    assert keyed_seed(1, "23") != keyed_seed(12, "3")
    assert 0 <= keyed_seed("x") < 2**63


def test_seeding_reaches_every_generator():
    draws = []
    for _ in range(2):
        seed_everything(5)
        draws.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
    assert draws[0] == draws[1]


def test_a_state_of_another_format_is_refused():
    state = RunState(global_steps=1, dataloader={}).to_dict()
    assert RunState.from_dict(state).global_steps == 1
    with pytest.raises(ValueError, match="has format 2"):
        RunState.from_dict({**state, "format": 2})


@pytest.mark.parametrize("changed", ["code", "weights"])
def test_a_reward_file_or_a_model_that_was_changed_in_place_is_another_run(tmp_path, changed):
    toy = make_toy(tmp_path)
    changes = ["trainer.save_freq=1", "trainer.total_training_steps=1"]
    toy_run(toy, tmp_path, *changes)
    if changed == "code":
        (toy / "reward.py").write_text(REWARD.replace("/ 8", "/ 4"))
    else:
        with open(toy / "model" / "model.safetensors", "r+b") as file:
            file.seek(-1, 2)
            file.write(b"\x3d")
    changes[1] = "trainer.total_training_steps=2"
    with pytest.raises(CheckpointMismatchError, match=f"{changed}: .* was .* and is "):
        toy_run(toy, tmp_path, *changes)
    metrics, _ = toy_run(toy, tmp_path, *changes, f"trainer.resume_may_change=[{changed}]")
    assert [step["step"] for step in metrics] == [2]


def test_a_run_that_goes_on_with_other_graders_tells_how_many_scores_are_others(
    tmp_path, monkeypatch, caplog
):
    toy, stored = make_toy(tmp_path), tmp_path / "stored"
    changes = ["trainer.save_freq=1", f"trainer.rollout_data_dir={stored}"]
    toy_run(toy, tmp_path, *changes, "trainer.total_training_steps=1")
    (entry, *_) = map(json.loads, (stored / "1.jsonl").read_text().splitlines())
    graded = {"data_source": "gsm8k", "gts": "7", "output": "#### 7", "score": 0.0}
    (stored / "1.jsonl").write_text(json.dumps({**entry, **graded}) + "\n")
    monkeypatch.setattr(checkpointing, "graders_identity", lambda: {"verl": "another"})
    changes.append("trainer.total_training_steps=2")
    with pytest.raises(CheckpointMismatchError, match=r"graders: verl is new"):
        toy_run(toy, tmp_path, *changes)
    # The toy's scores are those of its own function, which are left alone.
    monkeypatch.setattr(checkpointing, "has_built_in_scores", lambda config: True)
    with caplog.at_level(logging.WARNING):
        toy_run(toy, tmp_path, *changes, "trainer.resume_may_change=[graders]")
    assert "of 1 stored responses of gsm8k 1 have another score now" in caplog.text

"""The whole thing, from files to weights, learns a task that can be learned in seconds."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.toy import ROLLOUT, toy_overrides, toy_run

ROOT = Path(__file__).parents[2]


def test_the_policy_learns_to_write_sevens(toy, tmp_path):
    changes = [
        f"{ROLLOUT}.n=8",
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "trainer.total_training_steps=12",
        "trainer.val_before_train=true",
        "trainer.test_freq=12",
    ]
    metrics, trainer = toy_run(toy, tmp_path, *changes)
    scores = [step["critic/score/mean"] for step in metrics if "critic/score/mean" in step]
    assert scores[0] < 0.1
    assert scores[-1] > 0.8
    held_out = [step["val-core/sevens/acc/mean@1"] for step in (metrics[0], metrics[-1])]
    assert held_out[1] - held_out[0] > 0.5
    entropies = [step["actor/entropy"] for step in metrics if "actor/entropy" in step]
    assert entropies[-1] < entropies[0] / 3
    assert not trainer.tripwires.counts.keys() & {"ratio_not_one", "rollout_mismatch", "non_finite"}


def test_a_critic_helps_to_learn_it_too(toy, tmp_path):
    changes = [
        "algorithm.adv_estimator=gae",
        "data.train_batch_size=12",
        "actor_rollout_ref.actor.ppo_mini_batch_size=12",
        f"{ROLLOUT}.n=4",
        "trainer.total_training_steps=12",
    ]
    metrics, _ = toy_run(toy, tmp_path, *changes)
    assert metrics[-1]["critic/score/mean"] > 0.5
    assert metrics[-1]["critic/vf_loss"] < metrics[3]["critic/vf_loss"]


@pytest.mark.slow
def test_the_command_trains_and_says_how_it_goes(toy, tmp_path):
    result = command(*toy_overrides(toy, tmp_path), "trainer.logger=[console]", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "step:2 - " in result.stdout
    assert "critic/score/mean:" in result.stdout
    assert "has no effect here: there is no critic" in result.stderr


@pytest.mark.slow
def test_bad_data_ends_the_command_with_its_own_exit_code(toy, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text(json.dumps({"prompt": None}) + "\n")
    result = command(*toy_overrides(toy, tmp_path), f"data.train_files={bad}", cwd=tmp_path)
    assert result.returncode == 65
    assert "bad.jsonl:1: prompt is null" in result.stderr
    assert "Traceback" not in result.stderr


def command(*overrides: str, cwd: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "verl.trainer.main_ppo",
            *overrides,
            f"hydra.run.dir={cwd / 'hydra'}",
        ],
        capture_output=True,
        text=True,
        timeout=110,
        cwd=ROOT,
        check=False,
    )

"""The example scripts and SkyPilot tasks start a training that the loader accepts.

`python` is a stand-in that notes its arguments, so the shell does all its expansions.
"""

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.config.composing import from_command_line
from verl.config.validate import validate

ROOT = Path(__file__).parents[2]
PYTHON = """#!/bin/bash
printf '%s\\0' "$@" >>"$NOTES"
"""


def started(tmp_path, command, **variables):
    """The overrides of the training that a shell command would start."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text(PYTHON)
    (tmp_path / "bin" / "python").chmod(0o755)
    env = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "NOTES": str(tmp_path / "notes"),
        **variables,
    }
    subprocess.run(["bash", "-c", command], env=env, cwd=ROOT, check=True, timeout=60)
    module, *overrides = (tmp_path / "notes").read_text().split("\0")[1:-1]
    assert module == "verl.trainer.main_ppo"
    return overrides


def accepted(overrides):
    composed = from_command_line(*overrides, "trainer.dry_run=True")
    faults = validate(composed.config, composed.loaded.user_set)
    assert not composed.notices
    assert not [str(fault) for fault in faults if not fault.is_about_machine]
    return composed.config


@pytest.mark.parametrize(("name", "estimator"), [("ppo", "gae"), ("grpo", "grpo")])
def test_a_script_starts_a_training_that_the_loader_accepts(tmp_path, name, estimator):
    script = f"examples/{name}_trainer/run_gsm8k.sh"
    overrides = started(tmp_path, f"bash {script} trainer.save_freq=7", MODEL="m")
    config = accepted(overrides)
    assert config.algorithm.adv_estimator == estimator
    assert config.actor_rollout_ref.model.path == "m"
    assert config.trainer.save_freq == 7  # arguments win


@pytest.mark.parametrize("name", ["verl-ppo", "verl-grpo", "verl-multiturn-tools"])
def test_a_task_of_skypilot_starts_one_too(tmp_path, name):
    task = yaml.safe_load((ROOT / "examples" / "skypilot" / f"{name}.yaml").read_text())
    assert task["name"] == name
    (prepared,) = [line for line in task["setup"].splitlines() if line.startswith("python ")]
    assert (ROOT / prepared.split()[1]).is_file()
    overrides = started(tmp_path, task["run"], SKYPILOT_NUM_GPUS_PER_NODE="1", **task["envs"])
    config = accepted(overrides)
    assert config.trainer.default_local_dir == f"/checkpoints/{name}"
    turns = config.actor_rollout_ref.rollout.multi_turn
    assert turns.enable is (name == "verl-multiturn-tools")
    if turns.enable:
        assert (ROOT / turns.tool_config_path).is_file()

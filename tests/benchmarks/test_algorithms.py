"""The comparison of algorithms: its settings are valid, its numbers are what they say."""

import math
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from benchmarks.algorithm_table import ALGORITHMS, CONTROLS
from benchmarks.algorithms import COMMON, interval, run_one, settings_of, summary_of, table
from verl.config.load import load_config
from verl.config.ppo import PPOConfig
from verl.config.validate import validate


@pytest.mark.slow
def test_every_entry_of_the_table_is_a_valid_run(tmp_path):
    (tmp_path / "file.py").write_text("")
    file, wrong = tmp_path / "file.py", {}
    places = [f"data.train_files={file}", f"data.val_files={file}"]
    places += [f"actor_rollout_ref.model.path={tmp_path}", f"critic.model.path={tmp_path}"]
    for name in (*ALGORITHMS, *CONTROLS):
        own = [one.replace("{model}", str(tmp_path)) for one in settings_of(name)]
        read = load_config(
            OmegaConf.from_dotlist([*COMMON, *places, *own]), PPOConfig, keeps_unknown=True
        )
        faults = validate(read.config, read.user_set, known_faults=read.faults)
        if faults:
            wrong[name] = [str(fault) for fault in faults]
    assert wrong == {}


def test_every_algorithm_has_a_page():
    pages = [algorithm.page or name for name, algorithm in ALGORITHMS.items()]
    assert [page for page in pages if not Path(f"docs/algorithms/{page}.md").exists()] == []


def test_the_interval_is_students():
    """Five runs of mean 3 and variance 2.5: 2.776 sqrt(2.5 / 5)."""
    assert interval([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2.776 * math.sqrt(0.5))
    assert math.isnan(interval([1.0]))


def test_controls_come_last_and_failures_are_told():
    good = {"accuracy": [0.0, 1.0], "num_prompts": 32, "seconds": 1.0}
    rows = {
        "lr_0": summary_of([good, good]),
        "grpo": summary_of([good, {"error": "out of memory"}]),
        "ppo": summary_of([{"error": "out of memory"}]),
    }
    lines = table(rows, 2, 10).splitlines()
    assert [line.split("|")[1].strip() for line in lines[4:6]] == [
        "[GRPO](grpo.md)",
        "control: lr_0",
    ]
    assert "1 runs of grpo failed." in lines
    assert "1 runs of ppo failed." in lines


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_recipes_learn_where_the_controls_do_not():
    steps = 60
    found = {
        name: run_one(name, 0, steps)["accuracy"]
        for name in ("dapo", "kl_cov", "vapo", "pf_ppo_replay", *CONTROLS)
    }
    for name, accuracy in found.items():
        if name in CONTROLS:
            assert accuracy[-1] < 0.25, name
        else:
            assert accuracy[-1] > accuracy[0] + 0.2, name

"""The comparison of algorithms: its settings are valid, its numbers are what they say."""

import json
import math
import shlex
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from benchmarks.algorithm_pages import (
    NOTE,
    NUMBERS,
    add_runs,
    comparison,
    page,
    settings_on_page,
)
from benchmarks.algorithm_table import ALGORITHMS, CONTROLS, ESTIMATOR
from benchmarks.algorithms import (
    COMMON,
    interval,
    run_one,
    settings_of,
    summaries_of,
    summary_of,
    table,
)
from verl.config.load import load_config
from verl.config.ppo import PPOConfig
from verl.config.validate import validate

ALONE = ("gae", "reinforce_plus_plus", "remax")
"""Estimators that need one response to a prompt."""


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


@pytest.mark.slow
def test_every_pages_command_is_a_valid_run():
    wrong = {}
    for name, algorithm in ALGORITHMS.items():
        if algorithm.page is not None:
            continue
        options = shlex.split(" ".join(settings_on_page(algorithm)))
        read = load_config(OmegaConf.from_dotlist(options), PPOConfig, keeps_unknown=True)
        faults = validate(read.config, read.user_set, known_faults=read.faults)
        # The files of the data, and their folders, are on the reader's machine.
        found = [str(fault) for fault in faults if "$HOME" not in str(fault)]
        if found:
            wrong[name] = found
    assert wrong == {}


def test_what_compares_responses_to_a_prompt_has_several_in_its_pages_command():
    for algorithm in ALGORITHMS.values():
        is_of_groups = not {f"{ESTIMATOR}={name}" for name in ALONE} & set(algorithm.settings)
        assert algorithm.samples > 1 or not is_of_groups, algorithm.title


def test_every_algorithm_has_a_page():
    pages = [algorithm.page or name for name, algorithm in ALGORITHMS.items()]
    assert [page for page in pages if not Path(f"docs/algorithms/{page}.md").exists()] == []


def test_the_interval_is_students():
    """Five runs of mean 3 and variance 2.5: 2.776 sqrt(2.5 / 5)."""
    assert interval([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2.776 * math.sqrt(0.5))
    assert math.isnan(interval([1.0]))


def test_controls_come_last_and_failures_are_told():
    good = {"seed": 0, "steps": [0, 5], "accuracy": [0.0, 1.0], "num_prompts": 32}
    rows = {
        "lr_0": summary_of([good, good]),
        "grpo": summary_of([good, {"error": "out of memory"}]),
        "ppo": summary_of([{"error": "out of memory"}]),
    }
    lines = table(rows, 10).splitlines()
    assert [line.split("|")[1].strip() for line in lines[4:6]] == [
        "[GRPO](grpo.md)",
        "control: lr_0",
    ]
    assert "1 runs of grpo failed." in lines
    assert "1 runs of ppo failed." in lines


def test_runs_of_which_only_the_end_is_known_count_for_the_end_alone():
    curve = {"seed": 4, "steps": [0, 5], "accuracy": [0.0, 1.0], "num_prompts": 32}
    end = {"seed": 1, "accuracy": [0.5]}
    found = summary_of([curve, end])
    assert found["by_seed"] == {1: 0.5, 4: 1.0}
    assert (found["final"], found["area"], found["prompts"]) == (0.75, 0.5, 32)
    assert found["seeds_with_curve"] == [4]
    assert "| 0.75 ± 3.18 | 0.50, 1.00 | 0.50 | 32 |" in table({"grpo": found}, 10)


def test_a_run_takes_the_place_of_the_one_with_its_algorithm_and_seed(tmp_path):
    def run(name, seed, end, **more):
        return {"name": name, "seed": seed, "accuracy": [end], "machine": "small", **more}

    kept = {"steps": 80, "runs": [run("grpo", 0, 0.5), run("ppo", 0, 0.4)]}
    lines = [run("ppo", 0, 0.6), run("ppo", 1, 0.7, machine="large"), run("rloo", 0, 0, error="x")]
    (tmp_path / "runs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = add_runs(kept, tmp_path)
    ends = [(one["name"], one["seed"], one["accuracy"][-1]) for one in found["runs"]]
    assert ends == [("grpo", 0, 0.5), ("ppo", 0, 0.6), ("ppo", 1, 0.7)]
    text = comparison(found)
    assert "- small: seeds 0\n- large: seeds 1" in text
    assert "| [PPO](ppo.md) | 0.65 ± 0.64 | 0.60, 0.70 | nan | nan |" in text


def test_the_pages_show_the_numbers_beside_them():
    results = json.loads(NUMBERS.read_text())
    assert Path("docs/algorithms/comparison.md").read_text() == comparison(results)
    summaries = summaries_of(results["runs"])
    assert set(summaries) == {*ALGORITHMS, *CONTROLS}
    assert all(len(row["by_seed"]) >= 5 for row in summaries.values())
    for name, algorithm in ALGORITHMS.items():
        text = Path(f"docs/algorithms/{algorithm.page or name}.md").read_text()
        if NOTE in text:
            assert text == page(name, algorithm, summaries[name]), name
        assert ".png)" in text, f"{name} has no curve"


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

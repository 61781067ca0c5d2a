"""A run that was killed and resumed ends as if nothing had happened, bit for bit."""

import json
import os
import re
import signal

import pytest

from tests.e2e.victim import PPO, STAGES, STEPS, run_child
from verl.utils.checkpoint.layout import LOCK, holding

TIMES = ("timing_s/", "timing_per_token_ms/", "perf/")


@pytest.fixture(scope="module")
def uninterrupted(toy, tmp_path_factory):
    output = tmp_path_factory.mktemp("uninterrupted")
    assert run_child(toy, output) == 0
    return outcome(output)


def outcome(output):
    """Everything a run leaves behind: each file of the last checkpoint, and the last metrics."""
    folder = output / "checkpoints" / f"global_step_{STEPS}"
    files = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in ("manifest.json", "data.json")
    }
    assert len(files) > 3
    state = without_durations(json.loads((folder / "data.json").read_text()))
    metrics = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return files, state, without_durations(metrics[-1]["data"])


def without_durations(state):
    if isinstance(state, dict):
        is_time = (*TIMES, "max_steps_duration")
        return {k: without_durations(v) for k, v in state.items() if not k.startswith(is_time)}
    return [without_durations(one) for one in state] if isinstance(state, list) else state


def assert_same(found, expected):
    files, state, metrics = found
    assert files.keys() == expected[0].keys()
    assert [name for name in files if files[name] != expected[0][name]] == []
    assert state == expected[1]
    assert metrics == expected[2]


@pytest.mark.parametrize(
    "stage",
    [
        pytest.param(stage, marks=[] if stage in ("update", "save") else pytest.mark.slow)
        for stage in (*STAGES, "save")
    ],
)
def test_a_run_killed_in_any_stage_continues_bit_for_bit(toy, tmp_path, uninterrupted, stage):
    assert run_child(toy, tmp_path, die=(stage, 3)) == -signal.SIGKILL
    assert run_child(toy, tmp_path) == 0
    assert_same(outcome(tmp_path), uninterrupted)
    said = (tmp_path / "output.txt").read_text()
    assert re.search(r"it died in \w+ of step 3, with [0-9]+\.[0-9] GiB resident", said)


@pytest.mark.slow
@pytest.mark.parametrize("step", range(1, STEPS))
def test_a_run_resumed_at_any_step_skips_and_repeats_nothing(toy, tmp_path, uninterrupted, step):
    assert run_child(toy, tmp_path, die=("finish_step", step)) == -signal.SIGKILL
    assert run_child(toy, tmp_path) == 0
    assert_same(outcome(tmp_path), uninterrupted)


@pytest.mark.slow
def test_a_run_with_a_critic_continues_bit_for_bit(toy, tmp_path):
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    assert run_child(toy, straight, *PPO) == 0
    assert run_child(toy, broken, *PPO, die=("update", 4)) == -signal.SIGKILL
    assert run_child(toy, broken, *PPO) == 0
    assert_same(outcome(broken), outcome(straight))


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["update", "save"])
def test_a_recipe_whose_reference_moves_continues_bit_for_bit(toy, tmp_path, stage):
    """Every second step the policy becomes the reference; step 3 begins with one of step 2."""
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    often = ("trainer.ref_update_freq=2", f"custom_reward_function.path={toy / 'parity.py'}")
    assert run_child(toy, straight, *often, recipe="spin") == 0
    assert run_child(toy, broken, *often, recipe="spin", die=(stage, 4)) == -signal.SIGKILL
    assert run_child(toy, broken, *often, recipe="spin") == 0
    files, state, metrics = outcome(straight)
    assert any(name.startswith("ref/") for name in files)
    assert metrics["preference/num_pairs"] > 0
    assert_same(outcome(broken), (files, state, metrics))


def test_a_resume_with_another_setting_is_refused_with_the_difference(toy, tmp_path):
    assert run_child(toy, tmp_path, die=("rollout", 3)) == -signal.SIGKILL
    assert run_child(toy, tmp_path, "actor_rollout_ref.actor.clip_ratio=0.3") != 0
    said = (tmp_path / "output.txt").read_text()
    assert "clip_ratio" in said
    assert "0.3" in said


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(toy, tmp_path, uninterrupted):
    assert run_child(toy, tmp_path, die=("rollout", 4)) == -signal.SIGKILL
    weights = next((tmp_path / "checkpoints/global_step_3/actor").rglob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    assert run_child(toy, tmp_path) == 0
    said = (tmp_path / "output.txt").read_text()
    assert weights.name in said
    assert "continuing after step 2" in said
    assert_same(outcome(tmp_path), uninterrupted)


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_run_asked_to_stop_finishes_its_step_saves_and_ends_well(
    toy, tmp_path, uninterrupted, number
):
    rarely = "trainer.save_freq=100"
    assert run_child(toy, tmp_path, rarely, die=("rollout", 3, number)) == 0
    assert (tmp_path / "checkpoints/latest_checkpointed_iteration.txt").read_text() == "3"
    assert "COMMITTED step=3" in (tmp_path / "output.txt").read_text()
    assert run_child(toy, tmp_path) == 0
    assert_same(outcome(tmp_path), uninterrupted)


def test_the_second_ctrl_c_ends_a_run_at_once(toy, tmp_path):
    twice = (signal.SIGINT, signal.SIGINT)
    assert run_child(toy, tmp_path, die=("rollout", 3, *twice)) == 128 + signal.SIGINT
    said = (tmp_path / "output.txt").read_text()
    assert "SIGINT: finishing the step, saving, then ending; again ends at once\n" in said
    assert "Traceback" not in said
    assert (tmp_path / "checkpoints/latest_checkpointed_iteration.txt").read_text() == "2"


@pytest.mark.slow
def test_ctrl_c_is_for_the_run_and_not_for_its_ranks(toy, tmp_path):
    two = ("trainer.n_gpus_per_node=2", "trainer.controller=local", "trainer.save_freq=100")
    assert run_child(toy, tmp_path, *two, die=("rollout", 3, signal.SIGINT)) == 0
    assert "COMMITTED step=3" in (tmp_path / "output.txt").read_text()


@pytest.mark.parametrize("shared", ["default_local_dir", "rollout_data_dir", "metrics"])
def test_a_second_run_in_the_folders_of_the_first_is_refused(toy, tmp_path, shared):
    is_tracker = shared == "metrics"
    lock = tmp_path / ".metrics.jsonl.lock" if is_tracker else tmp_path / shared / LOCK
    changes = [] if is_tracker else [f"trainer.{shared}={tmp_path / shared}"]
    with holding({shared: lock}):
        assert run_child(toy, tmp_path, *changes) != 0
    said = (tmp_path / "output.txt").read_text()
    assert f"is in use by another run: process {os.getpid()} on" in said
    assert "Loading weights" not in said


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["annotate", "update", "save"])
def test_prime_continues_with_its_reward_model_bit_for_bit(toy, tmp_path, stage):
    prime = (
        f"reward_model.model.path={toy / 'model'}",
        "reward_model.model.optim.lr=0.003",
        "reward_model.reward_manager=naive",
        "data.filter_truncate=false",
        "data.oversample_factor=1.5",
    )
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    assert run_child(toy, straight, *prime, recipe="prime") == 0
    assert run_child(toy, broken, *prime, die=(stage, 3), recipe="prime") == -signal.SIGKILL
    assert run_child(toy, broken, *prime, recipe="prime") == 0
    found = outcome(broken)
    assert any(name.startswith("reward_model/optimizer") for name in found[0])
    assert_same(found, outcome(straight))

"""When responses are scored does not change what is trained: during generation or afterwards."""

import pytest
import torch

from tests.toy import toy_run, weights

SLOW = """
import {module}, time

{kind} compute_score(data_source, solution_str, ground_truth, extra_info=None):
    {wait}(0.002 * (len(solution_str) % 5))  # not in the order of the rows
    value = sum(map(ord, solution_str)) % 7
    if extra_info["index"] == 2 and value == 3:
        return None
    return {{"score": value / 7, "acc": value > 3, "text": solution_str}}
"""
PLAIN = SLOW.format(module="math", kind="def", wait="time.sleep")
LATER = SLOW.format(module="asyncio", kind="async def", wait="await asyncio.sleep")


def run(toy, folder, text, *changes):
    """What two steps reported and made of the weights."""
    folder.mkdir()
    (folder / "scores.py").write_text(text)
    path = f"custom_reward_function.path={folder / 'scores.py'}"
    metrics, trainer = toy_run(toy, folder, path, *changes)
    return metrics, trainer.batch, weights(trainer)


def reward_metrics(metrics):
    return [
        {k: v for k, v in step.items() if k.startswith(("reward/", "critic/", "val-"))}
        for step in metrics
    ]


def assert_same(one, other):
    (metrics, batch, tensors), (other_metrics, other_batch, other_tensors) = one, other
    assert reward_metrics(metrics) == reward_metrics(other_metrics)
    assert torch.equal(batch.batch["token_level_scores"], other_batch.batch["token_level_scores"])
    assert batch.meta_info["reward_extra_keys"] == other_batch.meta_info["reward_extra_keys"]
    for name in ["uid", *batch.meta_info["reward_extra_keys"]]:
        assert batch.non_tensor_batch[name].tolist() == other_batch.non_tensor_batch[name].tolist()
    assert all(torch.equal(tensors[name], other_tensors[name]) for name in tensors)


ON, OFF = "reward_model.use_reward_loop=true", "reward_model.use_reward_loop=false"


@pytest.fixture(scope="module")
def alone(toy, tmp_path_factory):
    """Scored in a stage of its own, by a plain function, one response after another."""
    return run(toy, tmp_path_factory.mktemp("alone") / "run", PLAIN, OFF)


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        (PLAIN, [ON]),
        (LATER, [ON]),
        (PLAIN, [ON, "reward_manager.name=prime"]),
    ],
    ids=["plain", "async", "prime"],
)
def test_the_manner_of_scoring_changes_no_score_and_no_weight(toy, tmp_path, alone, text, changes):
    found = run(toy, tmp_path / "run", text, *changes)
    assert_same(found, alone)
    assert all(("timing_s/reward_wait" in step) == (ON in changes) for step in found[0])
    assert not any("timing_s/reward_wait" in step for step in alone[0])


def test_every_number_that_a_function_reports_is_logged(toy, tmp_path):
    text = """
def compute_score(solution_str, **kwargs):
    good = float("7" in solution_str)
    return {"score": 0.8 * good + 0.2, "correctness": good, "format": True, "pred": solution_str}
"""
    metrics, batch, _ = run(toy, tmp_path / "many", text, "trainer.test_freq=1")
    assert batch.meta_info["reward_extra_keys"] == ["correctness", "format", "pred"]
    for step in metrics:
        scores = step["critic/score/mean"]
        assert step["reward/correctness/mean"] == pytest.approx((scores - 0.2) / 0.8, abs=1e-6)
        assert step["reward/format/mean"] == 1.0
        assert "reward/pred/mean" not in step
        logged = "".join(step)
        assert "val-aux/sevens/correctness/mean@1" in logged
        assert "val-aux/sevens/format/mean@1" in logged


def test_groups_that_fail_are_set_aside(toy, tmp_path):
    text = """
def compute_score(extra_info, solution_str, **kwargs):
    if extra_info["index"] % 4 == 0:
        raise OSError("the judge is not there")
    return len(solution_str) % 3
"""
    changes = (OFF, "data.shuffle=false")
    metrics, batch, _ = run(toy, tmp_path / "faulty", text, *changes)
    assert set(batch.non_tensor_batch["index"].tolist()) == {5, 6, 7}
    assert [step["reward/num_groups_set_aside"] for step in metrics] == [1.0, 1.0]
    assert len(batch.meta_info["global_token_num"]) == len(batch) == 12


KILLED = """
import os, pathlib, signal

def compute_score(solution_str, extra_info, folder=None, **kwargs):
    mark = pathlib.Path(folder or "/") / str(extra_info["index"])
    if folder and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return len(solution_str) % 3
"""


@pytest.mark.slow
def test_processes_that_are_killed_while_they_grade_change_nothing(toy, tmp_path):
    """Every response gets the score of a run in which nothing happens."""
    prime = "reward_manager.name=prime"
    (tmp_path / "marks").mkdir()
    kills = f"custom_reward_function.reward_kwargs.folder={tmp_path / 'marks'}"
    killed = run(toy, tmp_path / "killed", KILLED, prime, kills)
    assert len(list((tmp_path / "marks").iterdir())) >= 8, "once for each prompt of two steps"
    assert_same(killed, run(toy, tmp_path / "calm", KILLED, prime))
    assert all(step["reward/num_errors"] == 0.0 for step in killed[0])


def test_a_prompt_without_a_greedy_baseline_goes_and_the_others_are_not_graded_again(toy, tmp_path):
    text = """
import pathlib

def compute_score(solution_str, extra_info, folder, **kwargs):
    with open(pathlib.Path(folder) / "calls", "a") as calls:
        calls.write(f"{extra_info['index']} ")
    if extra_info["index"] == 4:
        raise OSError("the judge is not there")
    return len(solution_str) % 3
"""
    changes = (
        "algorithm.adv_estimator=remax",
        "data.shuffle=false",
        "trainer.total_training_steps=2",
        f"custom_reward_function.reward_kwargs.folder={tmp_path}",
    )
    _, batch, _ = run(toy, tmp_path / "remax", text, ON, *changes)
    assert set(batch.non_tensor_batch["index"].tolist()) == {5, 6, 7}
    calls = (tmp_path / "calls").read_text().split()
    num_samples = len(batch) // 3
    assert [calls.count(index) for index in "4567"] == [num_samples + 2, *[num_samples + 1] * 3]

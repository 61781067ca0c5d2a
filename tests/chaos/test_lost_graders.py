"""Processes that grade are killed or stopped: the grade is right, or there is none, never a 0."""

import os
import signal
import time

import pytest

from tests.chaos import table
from tests.chaos.strikes import wait_until_gone
from tests.toy import toy_run
from verl.utils import forked_workers
from verl.workers.reward_manager.grader import InfraError, Score
from verl.workers.reward_manager.workers import WorkerPool

NAMES = {signal.SIGKILL: "kill -9", signal.SIGSTOP: "SIGSTOP"}
BOTH = pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"]
)


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch):
    monkeypatch.setattr(forked_workers, "PROBE_SECONDS", 0.3)


def show(phase, number, seconds):
    fault = NAMES[number]
    row = table.Row("pool of graders", "reward worker", fault, phase, seconds, seconds, limit=5.0)
    table.shown.append(row)
    assert row.is_kept


def remember(folder):
    """Called by a worker, so that the test can see what became of it."""
    (folder / f"pid-{os.getpid()}").touch()


def remembered(folder):
    return [int(file.name.removeprefix("pid-")) for file in folder.glob("pid-*")]


@BOTH
def test_a_worker_lost_while_it_grades_is_replaced_and_the_grade_is_right(tmp_path, number):
    def lost_once(value):
        remember(tmp_path)
        if not (tmp_path / "lost").exists():
            (tmp_path / "lost").touch()
            os.kill(os.getpid(), number)
        return value

    pool = WorkerPool(lost_once, timeout_seconds=60.0)
    start = time.monotonic()
    assert pool.call({"value": 0.5}) == Score(0.5, {"acc": 0.5})
    show("reward", number, time.monotonic() - start)
    pool.close()
    assert len(remembered(tmp_path)) == 2
    assert wait_until_gone(remembered(tmp_path)) == []


@BOTH
def test_a_worker_lost_between_two_calls_is_replaced(tmp_path, number):
    def half(**kwargs):
        remember(tmp_path)
        return 0.5

    pool = WorkerPool(half, timeout_seconds=60.0)
    pool.call({})
    (idle,) = remembered(tmp_path)
    os.kill(idle, number)
    start = time.monotonic()
    assert pool.call({}) == Score(0.5, {"acc": 0.5})
    show("any other", number, time.monotonic() - start)
    pool.close()
    assert len(remembered(tmp_path)) == 2
    assert wait_until_gone(remembered(tmp_path)) == []


@BOTH
def test_after_four_lost_workers_there_is_no_grade(tmp_path, number):
    def lost(**kwargs):
        remember(tmp_path)
        os.kill(os.getpid(), number)

    pool = WorkerPool(lost, timeout_seconds=60.0)
    grade = pool.call({})
    assert isinstance(grade, InfraError)
    assert grade.is_final
    assert "4 processes died or were stopped" in grade.reason
    pool.close()
    assert len(remembered(tmp_path)) == 4
    assert wait_until_gone(remembered(tmp_path)) == []


LOSES_ITS_WORKER = """
import os, pathlib, signal

LOST = pathlib.Path({lost!r})

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if {condition}:
        LOST.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    letters = solution_str.replace(" ", "")
    return 1.0 + sum(letter == ground_truth for letter in letters) / 8
"""
IN_PROCESSES = (
    "reward_model.reward_manager=prime",
    "trainer.total_training_steps=1",
    "data.shuffle=false",  # prompts 0 to 3
)


def metrics_of(toy, output, condition):
    """Of one step on four prompts, where a grader is killed whenever `condition` holds."""
    function, lost = output / "reward.py", output / "lost"
    output.mkdir(exist_ok=True)
    function.write_text(LOSES_ITS_WORKER.format(lost=str(lost), condition=condition))
    (metrics,), _ = toy_run(toy, output, *IN_PROCESSES, f"custom_reward_function.path={function}")
    return metrics, lost.exists()


def test_a_run_whose_grader_is_killed_once_learns_what_it_would_have(own_toy, tmp_path):
    expected, _ = metrics_of(own_toy, tmp_path / "straight", "False")
    found, has_lost = metrics_of(own_toy, tmp_path / "struck", "not LOST.exists()")
    assert has_lost
    assert found["critic/rewards/mean"] == expected["critic/rewards/mean"]
    assert found["actor/grad_norm"] == expected["actor/grad_norm"]
    assert found["reward/num_groups_set_aside"] == 0


@pytest.mark.slow
def test_prompts_that_kill_every_grader_are_set_aside_and_counted(own_toy, tmp_path):
    """The others train, and no reward is a zero that no function gave."""
    found, has_lost = metrics_of(own_toy, tmp_path, "extra_info['index'] % 2 == 0")
    assert has_lost
    assert found["reward/num_groups_set_aside"] == 2.0
    assert found["critic/score/min"] >= 1.0

"""Processes that grade: killed when they hang, replaced when they die, gone with the trainer."""

import multiprocessing
import os
import signal
import subprocess
import threading
import time

import pytest

from tests.pace import wait_until
from verl.workers.reward_manager.grader import InfraError, Score
from verl.workers.reward_manager.workers import WorkerPool


@pytest.fixture
def pool_of():
    pools = []

    def make(function, timeout_seconds=100.0):
        pools.append(WorkerPool(function, timeout_seconds=timeout_seconds))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def pid_of(**kwargs):
    return {"score": 1.0, "pid": os.getpid()}


def test_a_call_runs_in_another_process_that_stays_for_the_next(pool_of):
    pool = pool_of(pid_of)
    first, second = pool.call({}), pool.call({})
    assert first.extras["pid"] == second.extras["pid"] != os.getpid()


def test_closures_and_async_functions_need_not_be_importable(pool_of):
    bonus = 0.25

    async def later(number):
        return number + bonus

    assert pool_of(later).call({"number": 1}).value == 1.25


def test_what_a_function_raises_in_a_worker_is_named_with_its_text(pool_of):
    def fails(**kwargs):
        raise KeyError("no such column")

    grade = pool_of(fails).call({})
    assert grade.reason == "the reward function raised KeyError: 'no such column'"


def test_a_worker_that_is_killed_while_it_grades_is_replaced_and_the_grade_is_right(
    pool_of, tmp_path
):
    """`kill -9` from outside, once: the response is graded on a new worker."""

    def slow_once(number):
        if not (tmp_path / "pid").exists():
            (tmp_path / "pid.new").write_text(str(os.getpid()))
            (tmp_path / "pid.new").rename(tmp_path / "pid")
            time.sleep(600)
        return number

    pool = pool_of(slow_once)
    grades = []
    caller = threading.Thread(target=lambda: grades.append(pool.call({"number": 0.5})))
    caller.start()
    wait_until((tmp_path / "pid").exists)
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    caller.join(timeout=60)
    assert grades == [Score(0.5, {"acc": 0.5})]


def test_a_hang_is_cut_at_the_deadline_with_all_that_the_call_started(pool_of, tmp_path):
    def starts_another(**kwargs):
        child = subprocess.Popen(["sleep", "600"])
        (tmp_path / "pids").write_text(f"{os.getpid()} {child.pid}")
        child.wait(timeout=600)

    pool = pool_of(starts_another, timeout_seconds=1.0)
    while not (tmp_path / "pids").exists():  # a busy machine may need a second try
        grade = pool.call({})  # cut, for the child sleeps longer than anyone waits for this test
        assert grade == InfraError("the reward function took longer than 1.0 s", is_timeout=True)
    worker, child = map(int, (tmp_path / "pids").read_text().split())
    assert not is_alive(worker)
    wait_until(lambda: not is_running(child))


def is_running(pid: int) -> bool:
    """False for what is dead but not yet collected by init."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_stopped_worker_counts_as_one_that_hangs(pool_of):
    def stops(**kwargs):
        os.kill(os.getpid(), signal.SIGSTOP)

    assert pool_of(stops, timeout_seconds=0.5).call({}).is_timeout


def test_without_its_fork_server_the_pool_goes_on(pool_of):
    pool = pool_of(pid_of)
    before = pool.call({}).extras["pid"]
    os.kill(pool._processes._server_pid, signal.SIGKILL)
    wait_until(lambda: not is_running(before))  # workers die with it
    after = pool.call({})
    assert after.extras["pid"] != before


def test_what_cannot_travel_is_a_fault_that_says_so(pool_of):
    pool = pool_of(lambda **kwargs: {"score": 1.0, "lock": threading.Lock()})
    assert "what the reward function reported cannot be sent" in pool.call({}).reason
    assert "what the reward function is given cannot be sent" in pool.call({"f": lambda: 0}).reason


def test_a_large_argument_and_a_large_report_arrive_whole(pool_of):
    text = "x" * 3_000_000
    grade = pool_of(lambda text: {"score": len(text), "echo": text}).call({"text": text})
    assert (grade.value, grade.extras["echo"] == text) == (3e6, True)


def test_a_pool_that_nobody_needs_ends_its_processes():
    pool = WorkerPool(pid_of, timeout_seconds=20.0)
    worker, server = pool.call({}).extras["pid"], pool._processes._server_pid
    del pool
    wait_until(lambda: not is_running(worker) and not is_running(server))


def train(line):
    """Stands in for a trainer whose reward function hangs."""

    def hangs(**kwargs):
        child = subprocess.Popen(["sleep", "600"])
        line.send([os.getpid(), child.pid])
        child.wait(timeout=600)

    pool = WorkerPool(hangs, timeout_seconds=600.0)
    line.send([pool._processes._server_pid])
    pool.call({})


def test_when_the_trainer_is_killed_nothing_is_left():
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    trainer = context.Process(target=train, args=(theirs,))
    trainer.start()
    pids = ours.recv() + ours.recv()  # the fork server, a worker, what the worker started
    assert all(is_running(pid) for pid in pids)
    trainer.kill()
    trainer.join(timeout=60)
    wait_until(lambda: not any(is_running(pid) for pid in pids))

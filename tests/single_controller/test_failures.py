"""A rank that raises, dies, stops or hangs is named, in time; the same on every back-end.

The first failure ends a wait, a death outranks the errors it causes, silence is bounded.
"""

import os
import signal
import time

import pytest
import torch

from tests.pace import pace, wait_until
from tests.single_controller.scripted import answer, failure, scripted_group
from tests.single_controller.workers import Calculator, FailsToStart
from verl import DataProto
from verl.single_controller import (
    ClassWithInitArgs,
    WorkerDied,
    WorkerError,
    WorkerTimeout,
)
from verl.single_controller.base import backend
from verl.single_controller.local import LocalWorkerGroup, processes


@pytest.fixture
def stopwatch():
    start = time.monotonic()
    return lambda: time.monotonic() - start


def test_an_exception_arrives_with_rank_method_and_remote_traceback(calculators):
    last = calculators.world_size - 1
    with pytest.raises(WorkerError) as caught:
        calculators.raise_on([last])
    error = caught.value
    assert type(error) is WorkerError
    assert (error.method, error.ranks) == ("raise_on", (last,))
    assert f"rank {last}" in str(error)
    assert f"ValueError: no rows on rank {last}" in str(error)
    assert "workers.py" in str(error)
    assert "in raise_on" in str(error)
    assert isinstance(error.__cause__, ValueError)
    assert len(calculators.add(1)) == calculators.world_size  # the group lives on


def test_the_first_failure_is_told_first_and_the_others_in_brief(calculators):
    if calculators.world_size == 1:
        pytest.skip("needs a second rank")
    with pytest.raises(WorkerError) as caught:
        calculators.raise_on(list(range(calculators.world_size)))
    text = str(caught.value)
    assert sorted(caught.value.ranks) == list(range(calculators.world_size))
    assert text.count("Traceback") + text.count("ray::") <= 2  # one full story
    assert "then also:" in text


@pytest.fixture
def impatient(monkeypatch):
    """A failure waits only a moment for others."""
    monkeypatch.setattr(backend, "AFTER_EXCEPTION_SECONDS", 0.2)


def test_a_failure_is_reported_while_other_ranks_are_busy(calculators, stopwatch, impatient):
    if calculators.world_size == 1:
        pytest.skip("needs a second rank")
    busy = calculators.execute_rank_zero_async("sleep_on", {0}, 1.5)
    with pytest.raises(WorkerError, match="no answer yet from rank 0"):
        calculators.raise_on([1])
    assert stopwatch() < 1.4
    calculators.resolve(busy)


def test_an_exception_that_cannot_travel_is_told_as_text(calculators):
    with pytest.raises(WorkerError, match="Untransportable"):
        calculators.raise_what_cannot_travel()


def test_a_hanging_rank_is_named_with_its_stack_at_the_deadline(calculators, stopwatch):
    last = calculators.world_size - 1
    with pytest.raises(WorkerTimeout) as caught:
        calculators.with_deadline(0.5).sleep_on([last], 1.5)
    assert 0.4 < stopwatch() < 1.4
    error = caught.value
    assert (error.method, error.ranks) == ("sleep_on", (last,))
    assert "no answer within 0.5 s" in str(error)
    assert "in sleep_on" in str(error)
    assert calculators.with_deadline(30).add(1)[0] == 101  # it answers again when it wakes


def test_a_deadline_belongs_to_the_view_it_was_given_to(calculators):
    hurried = calculators.with_deadline(0.2)
    assert calculators.sleep_on([0], 0.4) == list(range(calculators.world_size))
    with pytest.raises(WorkerTimeout):
        hurried.sleep_on([0], 0.4)
    calculators.with_deadline(30).add(1)
    with pytest.raises(ValueError, match="must be positive"):
        calculators.with_deadline(0)


def test_an_argument_that_failed_fails_the_call(calculators):
    if calculators.world_size == 1:
        pytest.skip("in one process the first call fails already")
    references = calculators.execute_all_async("raise_on", set(range(calculators.world_size)))
    with pytest.raises(WorkerError, match="no rows"):
        calculators.execute_all_sync("pass_through", references)


def test_a_killed_rank_is_told_at_once_while_the_others_hang(
    pair_launcher, stopwatch, caplog, monkeypatch
):
    monkeypatch.setattr(processes, "STOP_SECONDS", 0.5)
    group = pair_launcher.start(Calculator)
    pids = group.where()
    group.start_worker_aliveness_check(every_n_seconds=0.1)
    hanging = group.execute_rank_zero_async("sleep_on", {0}, 600)
    time.sleep(0.3)
    os.kill(pids[1], signal.SIGKILL)
    killed = stopwatch()
    with pytest.raises(WorkerDied) as caught:
        group.add(1)
    assert stopwatch() - killed < 60
    error = caught.value
    assert error.ranks == (1,)
    assert f"pid {pids[1]}" in str(error)
    assert "rank 1" in str(error)
    assert "no answer yet from rank 0" in str(error)
    # On Ray the node is told; the signal is not, because the parent is Ray's own process.
    is_local = pair_launcher.kind == "local"
    assert ("killed by SIGKILL" if is_local else f"on {group.master_address}") in str(error)
    with pytest.raises(WorkerDied):  # and again
        group.add(1)
    wait_until(lambda: "has died" in caplog.text)

    started = stopwatch()
    group.shutdown()
    group.shutdown()
    assert stopwatch() - started < 60  # although rank 0 hangs
    assert caplog.text.count("has died") == 1  # the check logs a death once, and does no more
    with pytest.raises(WorkerDied):
        group.resolve(hanging)


def test_a_stopped_rank_is_found_long_before_the_deadline(calculators, stopwatch, monkeypatch):
    pids = calculators.where()
    if os.getpid() in pids:
        pytest.skip("the driver itself would stop")
    monkeypatch.setattr(calculators._backend, "probe_seconds", 0.3)
    os.kill(pids[1], signal.SIGSTOP)
    try:
        with pytest.raises(WorkerTimeout) as caught:
            calculators.add(1)
    finally:
        os.kill(pids[1], signal.SIGCONT)
    assert stopwatch() < 5
    assert caught.value.ranks == (1,)
    assert "stopped by a signal" in str(caught.value)
    assert calculators.with_deadline(30).add(1)[1] == 102


def test_stopped_ranks_are_found_within_thirty_seconds_by_default(calculators):
    assert 2 * calculators._backend.probe_seconds + backend.SLICE_SECONDS < 30


def test_a_constructor_that_raises_is_reported(launcher):
    failing = launcher.world_size - 1
    with pytest.raises(WorkerError, match="no weights"):
        launcher.start(FailsToStart, failing).ready()


def test_a_group_in_this_process_can_be_shut_down_too():
    group = LocalWorkerGroup(None, ClassWithInitArgs(Calculator))
    group.add(1)
    group.shutdown()
    group.shutdown()
    with pytest.raises(WorkerDied, match="was shut down"):
        group.add(1)


def test_a_future_reports_the_first_failure_of_any_rank(calculators, stopwatch, impatient):
    """Although its parts are joined in the order of ranks, and rank zero is still busy."""
    if calculators.world_size == 1:
        pytest.skip("needs a second rank")
    busy = calculators.execute_rank_zero_async("sleep_on", {0}, 1.5)
    future = calculators.future_of(calculators.execute_all_async("raise_on", {1}), [0, 1])
    with pytest.raises(WorkerError, match="no rows on rank 1"):
        future.get()
    assert stopwatch() < 1.4
    calculators.resolve(busy)


def test_a_future_that_is_late_is_a_timeout_that_names_the_call(calculators):
    late = calculators.double_later(DataProto.from_dict({"x": torch.arange(4)}))
    assert late.get(timeout_seconds=30).batch["x"].tolist() == [0, 2, 4, 6]
    if calculators.world_size == 1:
        return  # in this process the result is there already
    busy = calculators.execute_rank_zero_async("sleep_on", {0}, 1 * pace())
    late = calculators.double_later(DataProto.from_dict({"x": torch.arange(4)}))
    with pytest.raises(WorkerTimeout, match=r"double_later: no answer within 0\.1 s") as caught:
        late.get(timeout_seconds=0.1)
    assert 0 in caught.value.ranks  # rank 1 too where the machine is busy
    calculators.resolve(busy)
    assert len(late.get(timeout_seconds=30)) == 4


def test_values_come_in_the_order_of_ranks_not_of_arrival():
    group = scripted_group([answer("a", after=0.05), answer("b")])
    assert group.execute_all_sync("f") == ["a", "b"]


def test_a_death_is_the_cause_even_when_its_echo_is_heard_first():
    group = scripted_group(
        [failure("connection reset"), failure("killed", after=0.2, is_death=True)]
    )
    with pytest.raises(WorkerDied) as caught:
        group.execute_all_sync("f")
    assert caught.value.ranks == (1, 0)
    assert str(caught.value).startswith("worker group 'scripted', f: rank 1 died: killed")
    assert "then also:\n  rank 0: connection reset" in str(caught.value)


def test_of_two_exceptions_the_earlier_is_the_cause():
    group = scripted_group([failure("later", after=0.1), failure("earlier")])
    with pytest.raises(WorkerError) as caught:
        group.execute_all_sync("f")
    assert caught.value.ranks == (1, 0)
    assert "trace of earlier" in str(caught.value)
    assert "trace of later" not in str(caught.value)


def test_a_failure_waits_only_a_moment_for_the_silent(monkeypatch):
    monkeypatch.setattr(backend, "AFTER_EXCEPTION_SECONDS", 0.2)
    group = scripted_group([failure("bad"), None, None])
    start = time.monotonic()
    with pytest.raises(WorkerError, match="no answer yet from ranks 1, 2"):
        group.execute_all_sync("f")
    assert 0.15 < time.monotonic() - start < 60


def test_silence_ends_at_the_deadline_and_is_described():
    group = scripted_group([answer(1), None], call_timeout_seconds=0.2)
    start = time.monotonic()
    with pytest.raises(WorkerTimeout) as caught:
        group.execute_all_sync("f")
    assert 0.15 < time.monotonic() - start < 60
    assert caught.value.ranks == (1,)
    assert "no answer within 0.2 s" in str(caught.value)
    assert "rank 1: stack 1" in str(caught.value)


def test_a_rank_found_stopped_twice_ends_the_wait():
    group = scripted_group([None])
    group._backend.stopped = [0]
    start = time.monotonic()
    with pytest.raises(WorkerTimeout, match="stopped by a signal"):
        group.execute_all_sync("f")
    assert time.monotonic() - start < 60


def test_only_some_stacks_of_many_silent_ranks_are_asked_for():
    group = scripted_group([None] * 40, call_timeout_seconds=0.05)
    with pytest.raises(WorkerTimeout) as caught:
        group.execute_all_sync("f")
    text = str(caught.value)
    assert text.count("stack") == 8
    assert "13, 14, 15 and 24 more" in text
    assert len(caught.value.ranks) == 40


def test_a_deadline_must_be_positive():
    with pytest.raises(ValueError, match="call_timeout_seconds is 0"):
        scripted_group([answer(1)], call_timeout_seconds=0)

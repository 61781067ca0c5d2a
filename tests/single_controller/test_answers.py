"""Waiting: the first failure ends it, a death outranks its echoes, silence is bounded."""

import time

import pytest

from tests.single_controller.scripted import answer, failure, scripted_group
from verl.single_controller import WorkerDied, WorkerError, WorkerTimeout
from verl.single_controller.base import backend


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
    assert 0.15 < time.monotonic() - start < 1


def test_silence_ends_at_the_deadline_and_is_described():
    group = scripted_group([answer(1), None], call_timeout_seconds=0.2)
    start = time.monotonic()
    with pytest.raises(WorkerTimeout) as caught:
        group.execute_all_sync("f")
    assert 0.15 < time.monotonic() - start < 0.5
    assert caught.value.ranks == (1,)
    assert "no answer within 0.2 s" in str(caught.value)
    assert "rank 1: stack 1" in str(caught.value)


def test_a_rank_found_stopped_twice_ends_the_wait():
    group = scripted_group([None])
    group._backend.stopped = [0]
    start = time.monotonic()
    with pytest.raises(WorkerTimeout, match="stopped by a signal"):
        group.execute_all_sync("f")
    assert time.monotonic() - start < 2


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

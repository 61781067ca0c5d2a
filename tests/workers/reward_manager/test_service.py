"""Trajectories are graded as they end; whatever the grader does, each of them gets a grade."""

import asyncio
import logging
import threading
import time

import pytest

from tests.pace import pace, wait_until
from verl.protocol.trajectory import Abstain, Group, InfraError, Score, Trajectory
from verl.utils import breaker
from verl.workers.reward_manager.grader import Grader
from verl.workers.reward_manager.service import GradingService, drop_reason


def trajectory(number, uid="a"):
    return Trajectory(uid=uid, sample=number, row={"number": number})


def group(uid, *numbers):
    return Group(index=0, uid=uid, drawn_at=1, trajectories=[trajectory(n, uid) for n in numbers])


class ByFunction(Grader):
    """Grades the number of a trajectory with a function, plain or async."""

    name = "the reward function"

    def __init__(self, function, **settings):
        self.function = function
        self.is_blocking = not asyncio.iscoroutinefunction(function)
        self.timeout_seconds = 20.0
        self.prepared = []
        vars(self).update(settings)

    def prepare(self, trajectories):
        self.prepared.append([t.sample for t in trajectories])

    async def grade(self, trajectory):
        result = self.function(trajectory.sample)
        return result if self.is_blocking else await result


@pytest.fixture
def service_of():
    services = []

    def make(function, **settings):
        services.append(GradingService(ByFunction(function, **settings)))
        return services[-1]

    yield make
    for service in services:
        service.close()


def grades(service, *numbers):
    trajectories = [trajectory(n) for n in numbers]
    service.grade_once(trajectories).result(30)
    return [t.grade for t in trajectories]


def plain(function):
    return function


def later(function):
    async def call(number):
        return function(number)

    return call


BOTH = pytest.mark.parametrize("kind", [plain, later])

# ---- the schedule --------------------------------------------------------------------------------


@BOTH
def test_grading_goes_on_while_trajectories_are_still_submitted(service_of, kind):
    has_begun = threading.Event()

    def function(number):
        has_begun.set()
        return Score(number)

    service = service_of(kind(function))
    group_ = group("a", 2, 0, 1)
    service.submit(group_.trajectories[:1])
    assert has_begun.wait(60), "the first is graded before the last is there"
    service.submit(group_.trajectories[1:2])
    assert service.wait([group_]) == 0, "what was never submitted is graded too"
    assert [t.grade.value for t in group_.trajectories] == [2, 0, 1]


def test_a_blocking_grader_that_waits_for_an_event_loop_is_told_so():
    class Waiting(ByFunction):
        async def grade(self, trajectory):
            await asyncio.sleep(0)
            return Score(1.0)

    service = GradingService(Waiting(lambda number: None, is_retryable=False))
    (grade,) = grades(service, 0)
    service.close()
    assert grade.reason.endswith("RuntimeError: a blocking grader waited for an event loop")


def test_the_threads_of_a_service_end_when_it_is_closed():
    before = set(threading.enumerate())
    service = GradingService(ByFunction(Score, max_concurrent=2))
    grades(service, *range(4))
    assert set(threading.enumerate()) - before, "they wait for more"
    service.close()
    wait_until(lambda: not set(threading.enumerate()) - before)


def test_what_an_outage_cost_is_graded_once_more_and_counted_as_it_failed(service_of, monkeypatch):
    is_away = threading.Event()

    def function(number):
        if is_away.is_set():
            raise ConnectionError("away")
        return Score(number)

    service = service_of(function)
    assert service.wait([group("a", 7)]) == 0, "it is known that this one can be graded"
    is_away.set()
    monkeypatch.setattr(breaker, "sleep", lambda seconds: is_away.clear())
    lost = group("b", *range(20))
    assert service.wait([lost]) == 40, "each failed twice before the pause, and not after it"
    assert [t.grade.value for t in lost.trajectories] == list(range(20))
    assert lost.fault is None


def test_one_hand_over_is_prepared_at_once_and_graded_on_one_thread(service_of):
    threads = set()

    def function(number):
        threads.add(threading.current_thread())
        return Score(number)

    service = service_of(function, max_concurrent=1)
    assert [grade.value for grade in grades(service, *range(100))] == list(range(100))
    assert service.grader.prepared == [list(range(100))]
    assert len(threads) == 1
    grades(service, 1)
    assert len(threads) == 1, "a function finds its thread again"


@BOTH
def test_no_more_than_the_allowed_number_run_at_the_same_time(service_of, kind):
    lock, running, most = threading.Lock(), 0, 0

    def enter(step):
        nonlocal running, most
        with lock:
            running += step
            most = max(most, running)

    def function(number):
        enter(1)
        wait_until(lambda: most >= 3)
        enter(-1)
        return Score(1.0)

    async def function_later(number):
        enter(1)
        while most < 3:
            await asyncio.sleep(0.001)
        enter(-1)
        return Score(1.0)

    service = service_of(function if kind is plain else function_later, max_concurrent=3)
    assert len(grades(service, *range(12))) == 12
    assert most == 3


def test_a_trajectory_is_graded_once_and_one_with_a_grade_not_at_all(service_of):
    calls = []

    def function(number):
        calls.append(number)
        return Score(1.0)

    service = service_of(function)
    group_ = group("a", 0, 1)
    group_.trajectories[1].grade = Score(0.5)
    for _ in range(3):
        service.submit(group_.trajectories)
    service.wait([group_])
    assert calls == [0]
    assert [t.grade.value for t in group_.trajectories] == [1.0, 0.5]


def test_services_share_an_event_loop_so_that_clients_outlive_them(service_of):
    async def function(number):
        return Score(float(id(asyncio.get_running_loop())))

    assert grades(service_of(function), 0) == grades(service_of(function), 0)


@pytest.mark.parametrize(("scope", "calls"), [("group", [[0, 1], [2]]), ("step", [[0, 1, 2]])])
def test_a_grader_of_wider_scope_is_called_when_that_is_complete(service_of, scope, calls):
    seen = []

    async def grade_many(trajectories):
        seen.append([t.sample for t in trajectories])
        return [Score(t.sample) for t in trajectories]

    service = service_of(lambda number: None, scope=scope, grade_many=grade_many, max_concurrent=1)
    groups = [group("a", 0, 1), group("b", 2)]
    service.submit(groups[0].trajectories)
    assert not seen
    service.wait(groups)
    assert seen == calls
    assert [t.grade.value for g in groups for t in g.trajectories] == [0, 1, 2]


@BOTH
def test_cancelling_stops_the_calls_and_releases_who_waits(service_of, kind):
    calls, release = [], threading.Event()

    def function(number):
        calls.append(number)
        if number == 0:
            release.wait(100)
        return Score(number)

    async def function_later(number):
        calls.append(number)
        if number == 0:
            await asyncio.sleep(100)
        return Score(number)

    settings = {"max_concurrent": 1, "timeout_seconds": 100.0}
    service = service_of(function if kind is plain else function_later, **settings)
    future = service.settle([group("a", 0, 1, 2)])
    wait_until(lambda: calls)
    service.cancel()
    assert future.cancelled()
    assert grades(service, 5) == [Score(5)], "the call that was given up holds nothing up"
    assert calls == [0, 5]
    release.set()


# ---- groups --------------------------------------------------------------------------------------


def test_a_group_with_an_error_is_graded_again_as_a_whole(service_of, caplog):
    calls = []

    def function(number):
        calls.append(number)
        if number == 3 and calls.count(3) == 1:
            raise OSError("not now")
        return Score(number)

    groups = [group("a", 0, 1), group("b", 2, 3)]
    with caplog.at_level(logging.WARNING):
        num_errors = service_of(function, max_concurrent=1).wait(groups)
    assert num_errors == 1
    assert calls == [0, 1, 2, 3, 2, 3]
    assert "raised OSError: not now; trying again" in caplog.text
    assert "test_service.py" in caplog.text, "where it was raised"
    assert [g.fault for g in groups] == [None, None]


def test_a_group_that_fails_twice_is_dropped_and_an_abstention_only_leaves_it(service_of):
    def function(number):
        return {1: InfraError("gone"), 4: Abstain("?"), 6: Abstain("?")}.get(number, Score(number))

    groups = [group("a", 0, 1), group("b", 2, 3, 4), group("c", 5, 6), group("d", 7)]
    assert service_of(function).wait(groups) == 2
    assert [g.fault for g in groups] == ["gone", None, "?", None]


def test_an_error_that_is_final_is_not_tried_again(service_of):
    calls = []

    def function(number):
        calls.append(number)
        return InfraError("4 processes died", is_final=True)

    group_ = group("a", 0)
    assert service_of(function).wait([group_]) == 1
    assert (calls, group_.fault) == ([0], "4 processes died")


def test_what_decides_over_a_group():
    score, unsure, error = Score(1.0), Abstain("?"), InfraError("gone")
    assert drop_reason([score, score]) is None
    assert drop_reason([score]) is None
    assert drop_reason([score, score, unsure]) is None
    assert drop_reason([score, unsure]) == "?"
    assert drop_reason([unsure]) == "?"
    assert drop_reason([score, score, unsure, error]) == "gone"


# ---- the boundary --------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (KeyError("prompt"), "raised KeyError: 'prompt'"),
        (SystemExit(3), "SystemExit(3)"),
        (asyncio.CancelledError(), "CancelledError"),
        (StopIteration(), "StopIteration"),
    ],
)
def test_an_exception_hits_one_trajectory_and_the_others_are_graded(
    service_of, kind, error, reason
):
    def function(number):
        if number == 1:
            raise error
        return Score(number)

    first, second, third = grades(service_of(kind(function)), 0, 1, 2)
    assert (first, third) == (Score(0), Score(2))
    assert isinstance(second, InfraError)
    assert reason in second.reason


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3.5e38, -1e39])
def test_a_score_that_is_not_finite_in_float32_is_an_error(service_of, value):
    (grade,) = grades(service_of(lambda number: Score(value)), 0)
    assert grade == InfraError(f"the reward function returned {value}")
    (grade,) = grades(service_of(lambda number: Score(3.4e38)), 0)
    assert grade == Score(3.4e38)


def test_a_wrong_number_of_grades_is_an_error_of_all(service_of):
    async def grade_many(trajectories):
        return [Score(1.0)]

    service = service_of(None, scope="step", grade_many=grade_many)
    for grade in grades(service, 0, 1):
        assert "1 grades for 2 responses" in grade.reason


def test_what_cannot_be_prepared_fails_and_the_next_hand_over_is_graded(service_of):
    service = service_of(lambda number: Score(number))
    prepare, service.grader.prepare = service.grader.prepare, lambda trajectories: 1 / 0
    assert "ZeroDivisionError" in grades(service, 0)[0].reason
    service.grader.prepare = prepare
    assert grades(service, 1) == [Score(1)]


# ---- the watchdog --------------------------------------------------------------------------------


@BOTH
def test_a_call_that_hangs_is_given_up_and_the_others_are_graded(service_of, kind):
    release = threading.Event()

    def function(number):
        if number == 1:
            release.wait(600)
        return Score(number)

    async def function_later(number):
        if number == 1:
            await asyncio.sleep(600)
        return Score(number)

    limit = 1.0 * pace()
    service = service_of(
        function if kind is plain else function_later, timeout_seconds=limit, max_concurrent=1
    )
    first, second, third = grades(service, 0, 1, 2)  # ends, though the call does not
    assert (first, third) == (Score(0), Score(2))
    assert second == InfraError(f"the reward function took longer than {limit} s", is_timeout=True)
    release.set()
    assert grades(service, 3) == [Score(3)]


def test_a_late_result_changes_nothing(service_of):
    may_return, has_returned = threading.Event(), threading.Event()

    def function(number):
        may_return.wait(60)
        has_returned.set()
        return Score(1.0)

    service = service_of(function, timeout_seconds=0.1)
    late = trajectory(0)
    service.grade_once([late]).result(60)
    assert late.grade.is_timeout
    may_return.set()
    assert has_returned.wait(60)
    time.sleep(0.05)
    assert late.grade.is_timeout


def test_a_function_that_blocks_the_event_loop_is_given_up_and_the_others_are_graded(service_of):
    release = threading.Event()

    async def function(number):
        if number == 1:
            release.wait(600)  # a mistake: nothing else runs meanwhile
        return Score(number)

    service = service_of(function, timeout_seconds=1.0 * pace(), max_concurrent=1)
    first, second, third = grades(service, 0, 1, 2)
    release.set()
    assert (first, third) == (Score(0), Score(2))
    assert second.is_timeout


@BOTH
def test_after_some_time_outs_in_a_row_the_rest_is_not_tried_until_the_retry(service_of, kind):
    calls = []

    def function(number):
        calls.append(number)
        time.sleep(20)

    async def function_later(number):
        calls.append(number)
        await asyncio.sleep(20)

    service = service_of(
        function if kind is plain else function_later, timeout_seconds=0.1, max_concurrent=1
    )
    group_ = group("a", *range(8))
    service.submit(group_.trajectories[:4])
    wait_until(lambda: len(calls) == 3)
    assert service.wait([group_]) == 16
    wait_until(lambda: len(calls) >= 2 * GradingService.MAX_TIMEOUTS_IN_A_ROW)
    assert len(calls) == 2 * GradingService.MAX_TIMEOUTS_IN_A_ROW
    assert "not tried after 3 time-outs in a row" in group_.trajectories[-1].grade.reason


def test_a_grader_with_deadlines_of_its_own_is_left_alone(service_of):
    def function(number):
        time.sleep(0.5)
        return Score(number)

    service = service_of(function, timeout_seconds=0.1, has_own_deadline=True)
    assert grades(service, 1) == [Score(1)]

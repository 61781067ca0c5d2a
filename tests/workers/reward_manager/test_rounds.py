"""Responses may be handed in one by one; their grades come back in the order of the rows."""

import asyncio
import threading
import time

from verl.workers.reward_manager.rounds import GradingLoop, GradingRound

from verl.workers.reward_manager.grader import InfraError, Score


def a_round(judge, **options):
    return GradingRound(judge, **{"timeout_seconds": 20.0, "max_concurrent": 64, **options})


def test_grading_goes_on_while_responses_are_still_added():
    begun = threading.Event()

    async def judge(number):
        begun.set()
        return Score(number)

    grading = a_round(judge)
    grading.add(2, 2.0)
    assert begun.wait(10), "the first is judged before the last is there"
    grading.add(0, 0.0)
    grading.add(1, 1.0)
    assert [grade.value for grade in grading.grades()] == [0.0, 1.0, 2.0]


def test_no_more_than_the_allowed_number_run_at_the_same_time():
    running, most = 0, 0

    async def judge(_):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return Score(1.0)

    grading = a_round(judge, max_concurrent=3)
    grading.add_all(enumerate(range(10)))
    assert len(grading.grades()) == 10
    assert most == 3


def test_rounds_share_an_event_loop_so_that_clients_outlive_them():
    async def judge(_):
        return Score(float(id(asyncio.get_running_loop())))

    found = []
    for _ in range(2):
        grading = a_round(judge)
        grading.add(0, None)
        found += grading.grades()
    assert found[0] == found[1]


def test_a_function_that_blocks_the_event_loop_is_given_up_and_the_next_round_works():
    async def judge(seconds):
        time.sleep(seconds)  # a mistake: nothing else runs meanwhile
        return Score(1.0)

    grading = a_round(judge, timeout_seconds=0.3)
    grading.add_all([(0, 0), (1, 3)])
    start = time.perf_counter()
    first, second = grading.grades()
    assert time.perf_counter() - start < 0.3 + 1.0
    assert first == Score(1.0)
    assert second.is_timeout
    again = a_round(judge)
    again.add(0, 0)
    assert again.grades() == [Score(1.0)]


def test_an_error_in_the_manager_itself_is_a_fault_of_that_response():
    async def judge(number):
        if number == 1:
            raise KeyError("prompt")
        return Score(1.0)

    grading = a_round(judge)
    grading.add_all(enumerate(range(3)))
    first, second, third = grading.grades()
    assert (first, third) == (Score(1.0), Score(1.0))
    assert second == InfraError("the reward manager raised KeyError: 'prompt'")


def test_a_cancelled_round_stops_calling():
    calls = []

    async def judge(number):
        calls.append(number)
        await asyncio.sleep(20)
        return Score(1.0)

    grading = a_round(judge, max_concurrent=1)
    grading.add_all(enumerate(range(3)))
    grading.cancel()
    for _ in range(4):  # cancelling takes the event loop a few turns
        assert GradingLoop.current().answers_within(10)
    assert calls in ([], [0])
    assert not grading._tasks

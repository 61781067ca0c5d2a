"""A reward function may do anything; what comes back is a score, an abstention or a named fault."""

import asyncio
import os
import re
import threading
import time
from fractions import Fraction

import numpy as np
import pytest
import torch

from tests.pace import pace, wait_until
from tests.tiny_tokenizer import tiny_tokenizer
from tests.workers.reward_manager.batches import batch
from verl.workers.reward_manager import get_reward_manager_cls
from verl.workers.reward_manager.abstract import UngradedResponses
from verl.workers.reward_manager.adapters import grades_of
from verl.workers.reward_manager.grader import Abstain, InfraError, Score, as_grade
from verl.workers.reward_manager.managers import DAPORewardManager, NaiveRewardManager
from verl.workers.reward_manager.service import GradingService


def manager(function, **options) -> NaiveRewardManager:
    options = {"timeout_seconds": 20.0, **options}
    return NaiveRewardManager(tiny_tokenizer(), 0, function, **options)


def grade(function, *texts, **options):
    return grades_of(batch(*(texts or ["7"])), manager(function, **options))


# ---- what a function is given --------------------------------------------------------------------


def test_a_function_sees_the_text_and_where_it_belongs():
    calls = []

    def function(**kwargs):
        calls.append(kwargs)
        return 1.0

    made = manager(function)
    grades_of(batch("78", __num_turns__=np.array([2])), made)
    assert calls == [
        {
            "data_source": "sums",
            "solution_str": "7 8",
            "ground_truth": "7",
            "extra_info": {"index": 0, "num_turns": 2, "rollout_reward_scores": {}},
        }
    ]


def test_a_function_cannot_change_the_batch():
    def function(data_source, solution_str, ground_truth, extra_info):
        extra_info["index"] = "changed"
        extra_info["deep"].append("changed")
        ground_truth.append("changed")
        return 1.0

    data = batch("7", extra_info=[{"index": 0, "deep": []}], reward_model=[{"ground_truth": []}])
    grades_of(data, manager(function))
    assert data.non_tensor_batch["extra_info"][0] == {"index": 0, "deep": []}
    assert data.non_tensor_batch["reward_model"][0] == {"ground_truth": []}


def test_one_response_can_be_graded_by_itself():
    made = manager(lambda solution_str, **kw: len(solution_str))
    assert asyncio.run(made.run_single(batch("777")))["reward_score"] == len("7 7 7")


# ---- what it may return --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("result", "value"),
    [
        (1, 1.0),
        (0.25, 0.25),
        (True, 1.0),
        (10**9, 1e9),
        (np.float32(0.5), 0.5),
        (np.bool_(True), 1.0),
        (torch.tensor(0.5), 0.5),
        (torch.tensor([0.5]), 0.5),
        (np.array([2.0]), 2.0),
        (Fraction(1, 4), 0.25),
        ({"score": 0.5}, 0.5),
    ],
)
def test_anything_that_is_one_number_is_a_score(result, value):
    assert as_grade(result).value == value


def test_a_mapping_reports_more_and_a_number_is_also_the_accuracy():
    assert as_grade({"score": 1, "acc": True, "pred": "7"}) == Score(
        1.0, {"acc": True, "pred": "7"}
    )
    assert as_grade(0.5) == Score(0.5, {"acc": 0.5})


BAD_RESULTS = [
    (float("nan"), "returned nan"),
    (float("inf"), "returned inf"),
    ("1.0", "returned str"),
    ([1.0], "returned list"),
    ((1.0, 2.0), "returned tuple"),
    (torch.ones(3), r"returned \(3,\) values for one response"),
    ({"acc": 1.0}, "mapping without score"),
    ({"score": float("nan")}, "returned nan"),
    (1j, "returned complex"),
]


@pytest.mark.parametrize(("result", "reason"), BAD_RESULTS, ids=[repr(r) for r, _ in BAD_RESULTS])
def test_anything_else_is_a_fault_and_never_a_reward(result, reason):
    (found,) = grade(lambda **kw: result)
    assert isinstance(found, InfraError)
    assert re.search(reason, found.reason)


def test_none_abstains():
    assert grade(lambda **kw: None) == [Abstain("the reward function returned None")]


def test_a_coroutine_from_a_plain_function_is_a_fault():
    async def later():
        return 1.0

    (found,) = grade(lambda **kw: later())
    assert "declare it `async def`" in found.reason


# ---- what it may do ------------------------------------------------------------------------------


def test_a_function_that_raises_is_a_fault_and_the_others_are_graded():
    def function(solution_str, **kw):
        if solution_str == "6":
            raise KeyError("no such key")
        return 1.0

    found = grade(function, "5", "6", "7")
    assert [type(g) for g in found] == [Score, InfraError, Score]
    assert found[1].reason == "the reward function raised KeyError: 'no such key'"


def test_a_function_that_exits_does_not_end_the_run():
    def function(**kw):
        raise SystemExit(3)

    (found,) = grade(function)
    assert "SystemExit(3)" in found.reason


def test_a_function_that_hangs_is_left_behind_at_its_deadline_and_the_others_are_graded():
    release = threading.Event()

    def function(solution_str, **kw):
        if solution_str == "6":
            release.wait(600)
        return 1.0

    found = grade(function, "5", "6", "7", timeout_seconds=1.0 * pace())
    release.set()
    assert [type(g) for g in found] == [Score, InfraError, Score]
    assert found[1].is_timeout


def test_a_child_process_is_killed_even_when_it_keeps_the_interpreter_busy(tmp_path):
    def function(solution_str, **kw):
        (tmp_path / solution_str).write_text(str(os.getpid()))
        if solution_str == "6":
            sum(range(10**12))  # one long call into C
        return 1.0

    for seconds in (1.0, 10.0, 40.0):  # a busy machine may not even start it in time
        found = grade(function, "5", "6", timeout_seconds=seconds, isolate=True)
        if (tmp_path / "6").exists() and isinstance(found[0], Score):
            break
    assert [type(g) for g in found] == [Score, InfraError]
    child = int((tmp_path / "6").read_text())
    assert child != os.getpid()
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_when_nothing_answers_the_rest_is_not_waited_for():
    calls = []

    def function(solution_str, **kw):
        calls.append(solution_str)
        time.sleep(30)

    found = grade(function, *"0123456789", timeout_seconds=0.2)
    wait_until(lambda: len(calls) >= GradingService.MAX_TIMEOUTS_IN_A_ROW)
    assert len(calls) == GradingService.MAX_TIMEOUTS_IN_A_ROW
    assert all(isinstance(g, InfraError) for g in found)
    assert "not tried after 3 time-outs in a row" in found[-1].reason


def test_async_functions_run_at_the_same_time_and_results_keep_their_order():
    running, most = 0, 0

    async def function(solution_str, **kw):
        nonlocal running, most
        running += 1
        most = max(most, running)
        while most < 8:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.02 * (8 - int(solution_str)))  # the last ends first
        running -= 1
        return float(solution_str)

    assert [g.value for g in grade(function, *"01234567")] == list(map(float, range(8)))
    assert most == 8


def test_an_async_function_that_hangs_is_cancelled():
    async def function(**kw):
        await asyncio.sleep(60)

    (found,) = grade(function, timeout_seconds=0.1)
    assert found.is_timeout


def test_plain_functions_run_one_at_a_time_unless_more_are_asked_for():
    lock = threading.Lock()
    running, most = 0, 0

    def function(**kw):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        wait_until(lambda: most >= num_workers)
        with lock:
            running -= 1
        return 1.0

    num_workers = 1
    grade(function, *"0123")
    assert most == 1
    num_workers = 4
    grade(function, *"0123", num_workers=4, timeout_seconds=60.0)
    assert most == 4


# ---- as a reward manager -------------------------------------------------------------------------


def test_calling_the_manager_puts_scores_on_the_last_tokens():
    made = manager(lambda solution_str, **kw: {"score": len(solution_str), "pred": solution_str})
    result = made(batch("7", "789"), return_dict=True)
    assert result["reward_tensor"].tolist() == [[1.0, 0, 0, 0], [0, 0, 5.0, 0]]
    assert result["reward_extra_info"] == {"pred": ["7", "7 8 9"]}
    assert torch.equal(made(batch("7", "789")), result["reward_tensor"])


def test_reports_that_only_some_responses_have_are_none_for_the_others():
    made = manager(lambda solution_str, **kw: {"score": 1, solution_str: True})
    extras = made(batch("5", "6"), return_dict=True)["reward_extra_info"]
    assert extras == {"5": [True, None], "6": [None, True]}


def test_a_tensor_is_refused_when_a_response_has_no_score():
    with pytest.raises(UngradedResponses, match=r"1 of 2 responses have no score; row 1: .*nan"):
        manager(lambda solution_str, **kw: float("nan") if solution_str == "6" else 1)(
            batch("5", "6")
        )


def test_scores_that_are_there_already_are_taken():
    data = batch("7", "8")
    data.batch["rm_scores"] = torch.full((2, 2), 0.5)
    made = manager(lambda **kw: pytest.fail("graded again"))
    assert torch.equal(made(data), data.batch["rm_scores"])


def test_the_model_manager_returns_a_reward_models_scores_and_asks_for_them():
    data = batch("7", "8")
    made = get_reward_manager_cls("model")(tiny_tokenizer(), 0, None)
    with pytest.raises(ValueError, match="the batch has no rm_scores"):
        made(data)
    data.batch["rm_scores"] = torch.full((2, 2), 0.5)
    assert torch.equal(made(data), data.batch["rm_scores"])
    found = made(data, return_dict=True)
    assert torch.equal(found["reward_tensor"], data.batch["rm_scores"])
    assert found["reward_extra_info"] == {}


def test_without_a_function_the_data_source_decides():
    data = batch("####7", "7")
    data.non_tensor_batch["data_source"][:] = "gsm8k"
    made = NaiveRewardManager(tiny_tokenizer(), 0)
    found = grades_of(data, made)
    assert [type(g) for g in found] == [Score, Score]


def test_the_managers_are_found_by_name():
    assert get_reward_manager_cls("naive") is NaiveRewardManager
    assert get_reward_manager_cls("dapo") is DAPORewardManager


@pytest.mark.parametrize("option", ["timeout_seconds", "num_workers"])
def test_limits_must_be_positive(option):
    with pytest.raises(ValueError, match=f"{option} of the reward manager is 0"):
        manager(lambda **kw: 1.0, **{option: 0})


# ---- dapo ----------------------------------------------------------------------------------------

BUFFER = {"enable": True, "len": 4, "penalty_factor": 1.0, "log": True}


def dapo(buffer, max_resp_len=6):
    return DAPORewardManager(
        tiny_tokenizer(), 0, lambda **kw: 1.0, max_resp_len=max_resp_len, overlong_buffer_cfg=buffer
    )


def test_the_penalty_grows_over_the_last_tokens_before_the_limit():
    made = dapo(BUFFER)
    assert [made.penalty(n) for n in (1, 2, 3, 4, 6)] == [0.0, 0.0, -0.25, -0.5, -1.0]
    found = grades_of(batch("12", "1234"), made)
    assert [g.value for g in found] == [1.0, 0.5]
    assert found[1].extras == {"acc": 1.0, "overlong_reward": -0.5, "overlong": True}


@pytest.mark.parametrize("buffer", [None, {"enable": False}])
def test_without_a_buffer_there_is_no_penalty(buffer):
    assert [g.value for g in grades_of(batch("123456"), dapo(buffer))] == [1.0]


def test_a_buffer_that_does_not_fit_is_refused():
    with pytest.raises(
        ValueError, match=r"overlong_buffer_cfg\.len is 9; .*max_resp_len, which is 6"
    ):
        dapo({**BUFFER, "len": 9})
    with pytest.raises(ValueError, match=r"lacks \['penalty_factor'\]"):
        dapo({"enable": True, "len": 4})

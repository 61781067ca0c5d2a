"""Whatever a reward function does to one response, every manager gives that response a fault, an
abstention or the number that was meant, and the others what they earned."""

import asyncio
import os
import threading
import time

import pytest
import torch

from tests.tiny_tokenizer import tiny_tokenizer
from tests.workers.reward_manager.batches import batch
from verl.trainer.ppo.reward import RewardError
from verl.trainer.ppo.scoring import score_batch
from verl.workers.reward_manager import get_reward_manager_cls
from verl.workers.reward_manager.adapters import RewardManagerBase, grades_of
from verl.workers.reward_manager.grader import (
    Abstain,
    InfraError,
    Score,
    as_grade,
    infra_error_of,
)

PATIENT_SECONDS = 60.0
"""Of a function that must not be cut, on however busy a machine."""

LIMITS_SECONDS = (0.3, 1.2, 4.8, 19.2)
"""Of one that hangs. The next is tried where the machine is too busy for the other responses."""

HANG_SECONDS = 600.0
FOREVER = threading.Event()


@pytest.fixture(autouse=True, scope="module")
def nothing_hangs_afterwards():
    FOREVER.clear()  # the module may be left and entered again
    yield
    FOREVER.set()


def raises(**kwargs):
    raise KeyError("no such answer")


def hangs(**kwargs):
    FOREVER.wait(HANG_SECONDS)


def exits(**kwargs):
    raise SystemExit(3)


def runs_out(**kwargs):
    raise StopIteration


def gives_a_coroutine(**kwargs):
    return asyncio.sleep(0)


def changes_its_inputs(extra_info, ground_truth, **kwargs):
    extra_info["index"] = ground_truth["answer"] = "changed"
    return 1.0


class Unreadable:
    def __float__(self):
        raise ValueError("unreadable")


class Unprintable(Exception):
    def __str__(self):
        raise ValueError("unprintable")

    __repr__ = __str__


def raises_what_cannot_be_printed(**kwargs):
    raise Unprintable


BAD = {
    "raises": (raises, InfraError),
    "raises_unprintable": (raises_what_cannot_be_printed, InfraError),
    "mapping_unprintable": (lambda **kw: {"acc": Unprintable()}, InfraError),
    "hangs": (hangs, InfraError),
    "exits": (exits, InfraError),
    "runs_out": (runs_out, InfraError),
    "none": (lambda **kw: None, Abstain),
    "nan": (lambda **kw: float("nan"), InfraError),
    "infinity": (lambda **kw: float("inf"), InfraError),
    "text": (lambda **kw: "1.0", InfraError),
    "mapping_without_score": (lambda **kw: {"acc": 1.0}, InfraError),
    "two_values": (lambda **kw: [1.0, 1.0], InfraError),
    "tensor_of_two": (lambda **kw: torch.ones(2), InfraError),
    "tensor_elsewhere": (lambda **kw: torch.ones((), device="meta"), InfraError),
    "unreadable": (lambda **kw: Unreadable(), InfraError),
    "coroutine": (gives_a_coroutine, InfraError),
    "huge": (lambda **kw: 10**9, 1e9),
    "beyond_float32": (lambda **kw: 1e39, InfraError),
    "beyond_float64": (lambda **kw: 10**400, InfraError),
    "bool": (lambda **kw: True, 1.0),
    "changes_its_inputs": (changes_its_inputs, 1.0),
}


def test_what_a_function_says_is_cut_in_messages():
    for result in ({"acc": "x" * 10**6}, "x" * 10**6):
        assert len(as_grade(result).reason) < 1200
    assert len(infra_error_of(ValueError("x" * 10**6), "it").reason) < 1200


class ByRunSingle(RewardManagerBase):
    """A user's class of the reward loop that passes on what its function gives."""

    def __init__(self, function, timeout_seconds):
        super().__init__(config=None, tokenizer=tiny_tokenizer())
        self.function = function
        self.timeout_seconds = timeout_seconds

    async def run_single(self, data):
        item = data[0]
        text = self.tokenizer.decode(item.batch["responses"][:1].tolist())
        extra_info = dict(item.non_tensor_batch["extra_info"])
        call = lambda: self.function(  # noqa: E731
            solution_str=text, extra_info=extra_info, ground_truth={}, data_source="sums"
        )
        return {"reward_score": await asyncio.to_thread(call)}


def made(name, function, timeout_seconds=PATIENT_SECONDS):
    options = {"timeout_seconds": timeout_seconds}
    if name == "rate_limited":
        options = {"timeout": timeout_seconds, "max_concurrent": 2}
    if name in ("prime", "remote"):
        options["num_workers"] = 2
    return get_reward_manager_cls(name)(tiny_tokenizer(), 0, function, **options)


def graded(data, make, *, hangs: bool):
    """The grades of a manager that `make` gives for a limit; a hang is cut before it ends."""
    start, grades = time.monotonic(), []
    for limit_seconds in LIMITS_SECONDS if hangs else (PATIENT_SECONDS,):
        grades = grades_of(data, make(limit_seconds))
        if isinstance(grades[0], Score) and isinstance(grades[-1], Score):
            break
    assert time.monotonic() - start < HANG_SECONDS
    return grades


def on_six(bad):
    """Does the bad thing to the response "6", and gives the others 1."""

    def function(solution_str, **kwargs):
        return bad(solution_str=solution_str, **kwargs) if solution_str == "6" else 1.0

    return function


def same(found, expected) -> bool:
    if isinstance(expected, type):
        return isinstance(found, expected)
    return isinstance(found, Score) and found.value == expected


@pytest.mark.parametrize("manager", ["naive", "dapo", "prime", "remote", "rate_limited"])
@pytest.mark.parametrize("name", BAD)
def test_one_response_is_hit_and_the_others_are_graded(manager, name):
    bad, expected = BAD[name]
    data = batch("5", "6", "7", reward_model=[{"ground_truth": {"answer": 7}}] * 3)
    make = lambda seconds: made(manager, on_six(bad), seconds)  # noqa: E731
    five, six, seven = graded(data, make, hangs=name == "hangs")
    assert same(six, expected), six
    assert (five, seven) == (Score(1.0, {"acc": 1.0}), Score(1.0, {"acc": 1.0}))
    assert data.non_tensor_batch["extra_info"].tolist() == [{"index": i} for i in range(3)]
    assert data.non_tensor_batch["reward_model"][1] == {"ground_truth": {"answer": 7}}


RAISE = ("raises", "raises_unprintable", "hangs", "exits", "runs_out")
IN_A_LIST = [name for name in BAD if name not in RAISE]


@pytest.mark.parametrize("name", IN_A_LIST)
def test_one_entry_of_a_list_is_bad_and_the_others_count(name):
    bad, expected = BAD[name]

    def function(data_sources, solution_strs, ground_truths, extra_infos):
        rows = zip(data_sources, solution_strs, ground_truths, extra_infos, strict=True)
        names = ("data_source", "solution_str", "ground_truth", "extra_info")
        return [on_six(bad)(**dict(zip(names, row, strict=True))) for row in rows]

    data = batch("5", "6", "7", reward_model=[{"ground_truth": {"answer": 7}}] * 3)
    five, six, seven = grades_of(data, made("batch", function))
    assert same(six, expected), six
    assert five.value == seven.value == 1.0
    assert data.non_tensor_batch["extra_info"].tolist() == [{"index": i} for i in range(3)]


async def raises_later(**kwargs):
    raises()


async def exits_later(**kwargs):
    raise SystemExit(3)


async def hangs_later(**kwargs):
    await asyncio.sleep(HANG_SECONDS)


@pytest.mark.parametrize("manager", ["naive", "prime", "rate_limited"])
@pytest.mark.parametrize("bad", [raises_later, exits_later, hangs_later])
def test_an_async_function_hits_one_response_and_the_others_are_graded(manager, bad):
    async def function(solution_str, **kwargs):
        return await bad() if solution_str == "6" else 1.0

    make = lambda seconds: made(manager, function, seconds)  # noqa: E731
    five, six, seven = graded(batch("5", "6", "7"), make, hangs=bad is hangs_later)
    assert isinstance(six, InfraError)
    assert five.value == seven.value == 1.0


OF_A_BATCH = {
    "raises": raises,
    "hangs": hangs,
    "exits": exits,
    "runs_out": runs_out,
    "none": lambda **kw: None,
    "a_number": lambda **kw: 1.0,
    "text": lambda **kw: "111",
    "too_few": lambda **kw: [1.0],
    "too_many": lambda **kw: [1.0] * 4,
    "wrong_shape": lambda **kw: torch.ones(3, 2),
    "coroutine": gives_a_coroutine,
}


@pytest.mark.parametrize("name", OF_A_BATCH)
def test_a_batch_function_that_fails_gives_no_scores_at_all(name):
    limit_seconds = LIMITS_SECONDS[0] if name == "hangs" else PATIENT_SECONDS
    grades = grades_of(batch("5", "6", "7"), made("batch", OF_A_BATCH[name], limit_seconds))
    assert [type(grade) for grade in grades] == [InfraError] * 3


@pytest.mark.parametrize("name", [n for n in BAD if n not in ("exits", "changes_its_inputs")])
def test_a_users_own_run_single_is_guarded_the_same_way(name):
    bad, expected = BAD[name]
    make = lambda seconds: ByRunSingle(on_six(bad), seconds)  # noqa: E731
    is_cut = name in ("hangs", "runs_out")  # no future can hold a StopIteration
    five, six, seven = graded(batch("5", "6", "7"), make, hangs=is_cut)
    assert same(six, expected), six
    assert five.value == seven.value == 1.0


@pytest.mark.parametrize("manager", ["naive", "prime", "batch"])
def test_a_function_that_is_always_wrong_stops_the_step(manager):
    data = batch("5", "6")
    data.non_tensor_batch["uid"] = data.non_tensor_batch["data_source"]
    with pytest.raises(RewardError, match=r"none of 2 responses could be scored: .*returned str"):
        score_batch(data, made(manager, lambda **kw: "great"))


@pytest.mark.parametrize("manager", ["prime", "remote"])
def test_a_function_that_kills_its_process_is_tried_four_times_and_no_more(manager, tmp_path):
    def dies(**kwargs):
        with (tmp_path / "attempts").open("a") as log:
            log.write("x")
        os._exit(9)

    five, six, seven = grades_of(batch("5", "6", "7"), made(manager, on_six(dies)))
    assert isinstance(six, InfraError)
    assert six.is_final
    assert "4 processes died" in six.reason
    assert (tmp_path / "attempts").read_text() == "xxxx"
    assert five.value == seven.value == 1.0

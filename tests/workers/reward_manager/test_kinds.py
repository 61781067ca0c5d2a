"""The managers `batch`, `prime`, `remote` and `rate_limited`, each by what it adds."""

import asyncio
import os
import threading
import time

import pytest
import torch
from omegaconf import OmegaConf

from tests.pace import pace, wait_until
from tests.tiny_tokenizer import tiny_tokenizer
from tests.workers.reward_manager.batches import batch
from verl.workers.reward_manager import (
    BatchRewardManager,
    PrimeRewardManager,
    RateLimitedRewardManager,
)
from verl.workers.reward_manager.abstract import UngradedResponses
from verl.workers.reward_manager.adapters import grades_of
from verl.workers.reward_manager.grader import Score
from verl.workers.reward_manager.managers import AsyncTokenBucket
from verl.workers.reward_manager.prime import RemoteRewardManager, parallel_compute_score_async

# ---- batch ---------------------------------------------------------------------------------------


def test_a_batch_function_is_called_once_with_lists_and_its_options():
    calls = []

    def function(data_sources, solution_strs, ground_truths, extra_infos, scale):
        calls.append((data_sources, solution_strs, ground_truths))
        return [{"score": scale * len(text), "index": info["index"]} for text, info in
                zip(solution_strs, extra_infos, strict=True)]  # fmt: skip

    manager = BatchRewardManager(tiny_tokenizer(), 0, function, scale=2.0)
    data = batch("7", "78")
    result = manager(data, return_dict=True)
    assert calls == [(["sums", "sums"], ["7", "7 8"], ["7", "7"])]
    assert result["reward_tensor"].sum(1).tolist() == [2.0, 6.0]
    assert result["reward_extra_info"] == {"index": [0, 1]}
    assert data.batch["acc"].tolist() == [2.0, 6.0]


@pytest.mark.parametrize("make", [list, tuple, torch.tensor])
def test_a_batch_function_may_return_any_row_of_numbers_and_may_be_async(make):
    async def function(solution_strs, **kwargs):
        return make([float(text) for text in solution_strs])

    manager = BatchRewardManager(tiny_tokenizer(), 0, function)
    assert [grade.value for grade in grades_of(batch("5", "6"), manager)] == [5.0, 6.0]


# ---- prime and remote ----------------------------------------------------------------------------


def test_prime_grades_in_several_processes_and_keeps_the_order(tmp_path):
    def function(solution_str, **kwargs):
        (tmp_path / str(os.getpid())).touch()
        wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
        return {"score": float(solution_str), "pid": os.getpid()}

    manager = PrimeRewardManager(tiny_tokenizer(), 0, function, num_workers=2)
    data = batch(*"12345")
    result = manager(data, return_dict=True)
    assert result["reward_tensor"].sum(1).tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
    pids = set(result["reward_extra_info"]["pid"])
    assert len(pids) == 2
    assert os.getpid() not in pids
    assert data.batch["acc"].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_remote_takes_its_number_of_processes_from_the_configuration():
    config = OmegaConf.create({"reward_model": {"num_workers": 3}})
    options = RemoteRewardManager.options_of(config)
    manager = RemoteRewardManager(tiny_tokenizer(), 0, lambda **kw: 1.0, **options)
    assert manager.max_concurrent == 3
    assert grades_of(batch("7"), manager) == [Score(1.0, {"acc": 1.0})]


def test_scores_of_many_completions_in_their_order_with_none_where_there_is_none():
    def evaluate(task, completion, reference, extra_info):
        if completion == "bad":
            raise ValueError("cannot read it")
        return float(completion == reference)

    completions, references = ["4", "5", "bad", "7"], ["4", "4", "4", "7"]
    scores = asyncio.run(
        parallel_compute_score_async(
            evaluate, completions, references, ["sums"] * 4, num_processes=2
        )
    )
    assert scores == [1.0, 0.0, None, 1.0]


def test_as_many_completions_are_scored_at_once_as_there_are_processes(tmp_path):
    def evaluate(task, completion, reference, extra_info):
        (tmp_path / completion).touch()
        wait_until(lambda: len(list(tmp_path.iterdir())) == 2, seconds=20)
        return 1.0

    scores = asyncio.run(
        parallel_compute_score_async(evaluate, ["a", "b"], ["", ""], ["", ""], num_processes=2)
    )
    assert scores == [1.0, 1.0]


# ---- rate_limited --------------------------------------------------------------------------------


def seconds_of(work) -> float:
    async def timed():
        start = time.perf_counter()
        await work()
        return time.perf_counter() - start

    return asyncio.run(timed())


def test_a_bucket_starts_full_and_then_flows_at_its_rate():
    async def take_six():
        bucket = AsyncTokenBucket(20.0, max_tokens=2.0)
        for _ in range(6):  # two are there, four more at 20 a second
            await bucket.acquire()

    assert 0.2 <= seconds_of(take_six) < 60


def test_a_request_above_the_capacity_waits_instead_of_failing():
    async def take_ten():
        await AsyncTokenBucket(20.0, max_tokens=5.0).acquire(10.0)

    assert 0.25 <= seconds_of(take_ten) < 60


def test_a_bucket_never_holds_more_than_its_capacity():
    async def take_after_a_pause():
        bucket = AsyncTokenBucket(1000.0, max_tokens=1.0)
        await asyncio.sleep(0.05)
        await bucket.acquire(0.0)
        assert bucket.tokens == 1.0

    seconds_of(take_after_a_pause)
    assert AsyncTokenBucket(7.0).max_tokens == 7.0
    with pytest.raises(ValueError, match="rate_limit is 0"):
        AsyncTokenBucket(0)


def test_a_limit_per_minute_lets_one_request_start_at_once():
    assert AsyncTokenBucket.per_minute(None) is None
    assert (
        AsyncTokenBucket.per_minute(6).rate_limit,
        AsyncTokenBucket.per_minute(6).max_tokens,
    ) == (0.1, 1.0)
    assert (
        AsyncTokenBucket.per_minute(600).rate_limit,
        AsyncTokenBucket.per_minute(600).max_tokens,
    ) == (10.0, 10.0)


def limited(function, **options):
    return RateLimitedRewardManager(tiny_tokenizer(), 0, function, **options)


def test_requests_per_minute_and_tokens_per_minute_are_kept():
    starts = []

    async def function(**kwargs):
        starts.append(time.perf_counter())
        return 1.0

    begin = time.perf_counter()
    grades_of(batch(*"1" * 24), limited(function, max_concurrent=8, max_rpm=1200))  # 20 a second
    assert starts[-1] - begin >= 0.19  # 20 at once, then one every 50 ms
    begin = time.perf_counter()
    options = {"max_tpm": 120_000, "estimated_tokens_per_request": 500}  # 4 a second
    grades_of(batch(*"1" * 5), limited(function, max_concurrent=8, **options))
    assert starts[-1] - begin >= 0.24


@pytest.mark.parametrize("is_async", [True, False])
def test_no_more_requests_than_allowed_at_a_time_also_one_by_one(is_async):
    lock, running, most = threading.Lock(), 0, 0

    def enter(step):
        nonlocal running, most
        with lock:
            running += step
            most = max(most, running)

    def plain(**kwargs):
        enter(1)
        wait_until(lambda: most >= 2)
        enter(-1)
        return 1.0

    async def later(**kwargs):
        enter(1)
        while most < 2:
            await asyncio.sleep(0.001)
        enter(-1)
        return 1.0

    manager = limited(later if is_async else plain, max_concurrent=2)

    async def all_at_once():
        return await asyncio.gather(*(manager.run_single(batch("7")) for _ in range(6)))

    results = asyncio.run(all_at_once())
    assert [result["reward_score"] for result in results] == [1.0] * 6
    assert most == 2


def test_waiting_for_a_turn_is_not_a_time_out():
    limit = 1.0 * pace()

    async def function(**kwargs):
        await asyncio.sleep(0.25 * limit)
        return 1.0

    grades = grades_of(batch(*"12345"), limited(function, max_concurrent=1, timeout=limit))
    assert [grade.value for grade in grades] == [1.0] * 5


def test_a_request_that_takes_too_long_is_no_score_in_training():
    async def function(**kwargs):
        await asyncio.sleep(20)

    manager = limited(function, timeout=0.1)
    with pytest.raises(UngradedResponses, match=r"took longer than 0\.1 s"):
        manager(batch("7"))

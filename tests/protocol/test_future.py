"""Batches that are still being computed."""

import pickle
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
from tensordict import TensorDict

from tests.protocol.batches import numbered, numbers, only_tensors
from verl.protocol import DataProto, DataProtoFuture


def done(result: object) -> Future:
    future: Future = Future()
    future.set_result(result)
    return future


def table(*values: int) -> TensorDict:
    return TensorDict({"x": torch.tensor(values)}, batch_size=[len(values)])


def test_the_parts_are_concatenated_in_order_whatever_finishes_first():
    def slow() -> DataProto:
        time.sleep(0.05)
        return numbered(4)[:1]

    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(slow), pool.submit(lambda: numbered(4)[1:])]
        assert numbers(DataProtoFuture.concat(futures).get()) == [0, 1, 2, 3]


def test_each_chunk_takes_its_share_when_it_is_fetched():
    whole = DataProtoFuture.concat([done(numbered(6)[:3]), done(numbered(6)[3:])])
    assert [numbers(chunk.get()) for chunk in whole.chunk(3)] == [[0, 1], [2, 3], [4, 5]]


def test_chunks_of_chunks_are_shares_of_shares():
    half = DataProtoFuture.concat([done(numbered(8))]).chunk(2)[1]
    assert [numbers(quarter.get()) for quarter in half.chunk(2)] == [[4, 5], [6, 7]]


def test_parts_may_be_tensordicts():
    whole = DataProtoFuture.concat([done(table(0, 1)), done(table(2, 3))])
    assert whole.get()["x"].tolist() == [0, 1, 2, 3]
    assert whole.chunk(2)[1].get()["x"].tolist() == [2, 3]


def test_own_functions_collect_and_dispatch():
    future = DataProtoFuture(
        collect_fn=lambda parts: parts[1],
        futures=[done(1), done(2)],
        dispatch_fn=lambda part: -part,
    )
    assert future.get() == -2


@pytest.mark.parametrize("parts", [[1, 2], [table(0), only_tensors(1)], []])
def test_other_parts_are_refused(parts):
    with pytest.raises(ValueError, match="all be DataProto or all TensorDict"):
        DataProtoFuture.concat([done(part) for part in parts]).get()


def test_a_part_that_does_not_arrive_is_named_after_the_deadline():
    future = DataProtoFuture.concat([done(numbered(1)), Future(), Future()])
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"part 1 of 3 .* within 0\.1 s"):
        future.get(timeout_seconds=0.1)
    assert time.monotonic() - start < 60


def test_the_deadline_is_for_all_parts_together():
    def slow() -> DataProto:
        time.sleep(0.08)
        return numbered(1)

    with ThreadPoolExecutor(1) as pool:  # one after the other
        futures = [pool.submit(slow) for _ in range(4)]
        with pytest.raises(TimeoutError, match=r"part \d of 4"):
            DataProtoFuture.concat(futures).get(timeout_seconds=0.12)


def test_the_error_of_a_part_is_raised_as_it_is():
    for error in (RuntimeError("worker 3 is out of memory"), TimeoutError("the worker's own")):
        future: Future = Future()
        future.set_exception(error)
        with pytest.raises(type(error), match=str(error)):
            DataProtoFuture.concat([future]).get()


def test_a_chunk_can_be_sent_to_the_worker_that_fetches_it():
    chunk = DataProtoFuture.concat([]).chunk(2)[1]
    assert pickle.loads(pickle.dumps(chunk)).dispatch_fn.keywords["number"] == 1


@pytest.mark.ray
def test_parts_may_be_ray_references(ray_cluster):
    import ray

    data = only_tensors(100_000)
    whole = DataProtoFuture.concat([ray.put(data[:10]), ray.put(data[10:])])
    assert torch.equal(whole.get(timeout_seconds=60).batch["number"], torch.arange(100_000))
    share = DataProtoFuture(lambda parts: parts[0], [ray.put(data)]).get(timeout_seconds=60)
    share.batch["number"] += 1  # Ray maps its store read-only: writing there would crash
    assert share.batch["number"][-1] == 100_000
    impossible = ray.remote(resources={"a resource nobody has": 1})(lambda: None).remote()
    with pytest.raises(TimeoutError, match="part 0 of 1"):
        DataProtoFuture.concat([impossible]).get(timeout_seconds=0.2)
    ray.cancel(impossible)

"""Rows that go from rank to rank while the driver only knows their lengths."""

import numpy as np
import pytest
import torch

from tests.single_controller.workers import Calculator
from verl import DataProto
from verl.protocol import BatchError
from verl.single_controller import ResourcePool
from verl.single_controller.base.dispatch import split
from verl.single_controller.base.futures import BatchByReference, by_reference, gather_rows


def rows(*values):
    return DataProto.from_dict({"x": torch.tensor(values)})


def tell_double(worker, part):
    return DataProto.from_dict(
        {"length": 2 * part.batch["x"]}, {"rank": np.full(len(part), worker.rank)}
    )


def referenced(group) -> BatchByReference:
    """Rows 11 to 14, in parts at the ranks of `group`."""
    return by_reference(group, group.increment_later(rows(10, 11, 12, 13)), tell_double)


def test_the_driver_learns_only_what_the_description_tells(pair_launcher):
    group = pair_launcher.start(Calculator)
    batch = referenced(group)
    assert set(batch.known.batch.keys()) == {"length"}
    assert batch.known.batch["length"].tolist() == [22, 24, 26, 28]
    assert batch.known.non_tensor_batch["rank"].tolist() == [1, 1, 0, 0]  # by who holds them
    assert batch.places.tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    ordered = batch.take([3, 0, 2, 1]).union(rows(0, 0, 0, 0).rename("x", "reward"))
    assert ordered.get(30).batch["x"].tolist() == [14, 11, 13, 12]
    assert group.double(ordered).batch["x"].tolist() == [28, 22, 26, 24]


@pytest.fixture
def pair():
    """Two parts that are futures already resolved."""
    parts = [Resolved(rows(1, 2, 3)), Resolved(rows(4))]
    known = DataProto.from_dict({"length": torch.tensor([10, 20, 30, 40])})
    return BatchByReference(known, parts, np.array([[0, 0], [0, 1], [0, 2], [1, 0]]))


class Resolved:
    def __init__(self, value):
        self.value = value

    def result(self, timeout=None):
        return self.value


def test_a_rank_gets_the_parts_its_rows_lie_in_and_no_others(pair):
    first, second = split(pair.take([3, 0, 1, 2]), 2)
    assert [len(share.futures) for share in (first, second)] == [2, 1]
    assert first.get(1).batch["x"].tolist() == [4, 1]
    assert first.get(1).batch["length"].tolist() == [40, 10]
    assert second.get(1).batch["x"].tolist() == [2, 3]


def test_rows_may_be_left_out_or_repeated(pair):
    assert pair.take([2, 2, 3]).get(1).batch["x"].tolist() == [3, 3, 4]
    assert len(pair.take([2])) == 1


def test_columns_of_the_driver_travel_with_the_rows(pair):
    batch = pair.union(DataProto.from_dict({"reward": torch.tensor([0.0, 1.0, 0.0, 1.0])}))
    assert batch.take([1, 2]).get(1).batch["reward"].tolist() == [1.0, 0.0]
    assert "reward" not in pair.known.batch


def test_a_batch_by_reference_must_divide(pair):
    with pytest.raises(BatchError, match="4 rows cannot be split evenly over 3 ranks"):
        split(pair, 3)
    with pytest.raises(BatchError, match="without rows"):
        split(pair.take([]), 2)


def test_gathering_gives_the_order_that_was_asked_for():
    parts = [rows(1, 2), rows(3, 4)]
    places = np.array([[1, 1], [0, 0], [1, 0]])
    known = DataProto.from_dict({"length": torch.tensor([7, 8, 9])})
    gathered = gather_rows(parts, places, known)
    assert gathered.batch["x"].tolist() == [4, 1, 3]
    assert gathered.batch["length"].tolist() == [7, 8, 9]


def test_one_rank_holds_its_rows_in_this_process():
    from verl.single_controller import ClassWithInitArgs
    from verl.single_controller.local import LocalWorkerGroup

    group = LocalWorkerGroup(ResourcePool([1]), ClassWithInitArgs(Calculator))
    batch = referenced(group)
    assert group.double(batch.take([1, 0])).batch["x"].tolist() == [24, 22]
    group.shutdown()

"""Rows go from rank to rank while the driver knows only their lengths, at the measured cost."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.controller_scale import Simulation, measure, slope
from tests.single_controller.workers import Calculator
from verl import DataProto
from verl.protocol import BatchError
from verl.single_controller import ResourcePool
from verl.single_controller.base.dispatch import split
from verl.single_controller.base.futures import BatchByReference, by_reference, gather_rows

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "scaling.md").read_text()
RESULTS = json.loads((ROOT / "benchmarks" / "results" / "controller_scale.json").read_text())


@pytest.fixture(scope="module")
def simulation():
    return Simulation(8)


def test_by_reference_the_bytes_of_a_row_do_not_pass_through_the_controller(simulation):
    through = measure(simulation, simulation.step_with_payload, repeats=1)
    by_reference = measure(simulation, simulation.step_by_reference, repeats=1)
    assert through["rows"] == by_reference["rows"] == 16
    tokens, columns, bytes_per_number = 2176, 6, 4
    in_and_out = 2 * tokens * columns * bytes_per_number
    assert in_and_out < through["bytes_per_row"] < 1.05 * in_and_out
    assert by_reference["bytes_per_row"] < 2000


def test_dead_workers_are_named_and_the_step_is_repeated(simulation):
    result = measure(simulation, simulation.step_by_reference, repeats=1)
    assert 0 < result["named_seconds"] < result["recovered_seconds"]
    assert simulation.backend.deaths() == {}


def test_the_slope_is_a_line_through_zero():
    rows = [{"workers": w, "cpu_seconds_per_step": 3e-4 * w} for w in (8, 64)]
    assert slope(rows) == pytest.approx(300)


def test_the_example_runs():
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(example, "docs/scaling.md", "exec"), {"__name__": "example"})


@pytest.mark.parametrize("transport", ["payload", "by reference"])
def test_the_page_shows_the_numbers_of_the_results(transport):
    for row in RESULTS["transports"][transport]:
        cells = (
            str(row["workers"]),
            transport,
            f"{row['cpu_us_per_worker']:.0f}",
            f"{row['bytes_per_row']:,.0f}",
            f"{row['fan_out_seconds']:.3f}",
            f"{row['named_seconds']:.3f}",
            f"{row['recovered_seconds']:.3f}",
        )
        assert f"| {' | '.join(cells)} |" in PAGE
    assert f"{RESULTS['us_per_worker'][transport]:.0f} µs" in PAGE
    assert RESULTS["command"] in PAGE


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
    assert batch.indices.tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
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
    indices = np.array([[1, 1], [0, 0], [1, 0]])
    known = DataProto.from_dict({"length": torch.tensor([7, 8, 9])})
    gathered = gather_rows(parts, indices, known)
    assert gathered.batch["x"].tolist() == [4, 1, 3]
    assert gathered.batch["length"].tolist() == [7, 8, 9]


def test_one_rank_holds_its_rows_in_this_process():
    from verl.single_controller import ClassWithInitArgs
    from verl.single_controller.local import LocalWorkerGroup

    group = LocalWorkerGroup(ResourcePool([1]), ClassWithInitArgs(Calculator))
    batch = referenced(group)
    assert group.double(batch.take([1, 0])).batch["x"].tolist() == [24, 22]
    group.shutdown()

"""The simulation behind docs/scaling.md runs, and the page shows what was measured."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.controller_scale import Simulation, measure, slope

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
    assert simulation.backend.dead_ranks() == []


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

"""The table of faults is complete, names tests that exist, and is the one in the docs."""

import ast
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.chaos.rows import ROWS
from tests.chaos.run import DOCS, States, with_table

ROOT = Path(__file__).parents[2]
EXPECTED = [
    *(f"F{n}" for n in range(1, 22)),
    *(f"D{n}" for n in range(1, 8)),
    *(f"X{n}" for n in range(1, 14)),
    *(f"G{n}" for n in range(1, 9)),
]


@cache
def functions_of(path):
    tree = ast.parse((ROOT / path).read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


def test_all_rows_are_there_once():
    assert [row.name for row in ROWS] == EXPECTED
    assert len(ROWS) == 49


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_each_row_names_tests_that_exist_or_says_what_is_missing(row):
    assert row.tests or row.missing
    for test in row.tests:
        path, _, name = test.partition("::")
        assert (ROOT / path).is_file(), test
        assert not name or name in functions_of(path), test


def test_the_page_has_this_table():
    assert with_table(DOCS.read_text()) == DOCS.read_text(), (
        "run python -m tests.chaos.run --write-docs"
    )


def test_the_state_of_a_row_is_that_of_its_tests():
    row = ROWS[0]
    first, second = row.tests[:2]
    states = States([row])
    assert states.state(row).startswith("not run here")
    states.outcomes = {first + "[a]": "passed", second: "skipped", first + "_but_longer": "failed"}
    states.reasons = {second: "there is no compiler"}
    assert states.state(row) == "passed 1; 1 not run: there is no compiler"
    states.outcomes[first + "[b]"] = "failed"
    assert states.state(row) == f"FAILED 1 of 3: {first}[b]"
    assert "1 rows: 0 passed, 1 failed" in states.table()


def test_outcomes_are_kept_as_they_come_and_only_the_rest_is_run_again(tmp_path):
    first, second = ROWS[:2]
    states = States(ROWS[:2], tmp_path / "states.json")
    for test, outcome in ((first.tests[0], "passed"), (second.tests[0], "failed")):
        report = SimpleNamespace(nodeid=test, when="call", outcome=outcome, skipped=False)
        report.failed, report.longreprtext = outcome == "failed", "why"
        states.pytest_runtest_logreport(report)
    kept = States.kept(ROWS[:2], tmp_path / "states.json")
    assert kept.table() == states.table()
    kept.forget(only_unpassed=True)
    assert kept.outcomes == {first.tests[0]: "passed"}
    part = States.kept([second], tmp_path / "states.json")
    part.forget(only_unpassed=False)
    assert part.outcomes == {first.tests[0]: "passed"}

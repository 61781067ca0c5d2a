"""`make chaos`: run the tests of every row, print the table with their states.

    python -m tests.chaos.run [ROW ...]        with no names: all rows, slow tests included
    python -m tests.chaos.run --jobs 1         one test after the other; most wait, so 3 is usual
    python -m tests.chaos.run --quick          without the slow tests, one after the other
    python -m tests.chaos.run --resume         only what has not passed since the last full start
    python -m tests.chaos.run --show           the table of what has run so far, from another shell
    python -m tests.chaos.run --write-docs     renew the table in docs/reliability.md
    python -m tests.chaos.run --patience 1     tests hang after their usual time; 6 times is usual

Outcomes are kept in `build/chaos.json` as they come, and what failing tests say in
`build/chaos.failures`, so that a run that is ended in between is not lost. A row has failed if one
of its tests has, passed if some passed and none failed, and is `not run here` if all were left out;
the reason is told.
"""

import argparse
import json
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.rows import ROWS, Row

DOCS = Path(__file__).parents[2] / "docs" / "reliability.md"
STATES = DOCS.parents[1] / "build" / "chaos.json"
BEGIN, END = "<!-- rows begin -->\n", "<!-- rows end -->\n"
NAMES_SHOWN = 44


class States:
    """A pytest plugin that keeps the outcome of every test."""

    def __init__(self, rows: Sequence[Row], path: Path | None = None) -> None:
        """With `path`, outcomes are kept there."""
        self.rows = rows
        self.outcomes: dict[str, str] = {}
        self.reasons: dict[str, str] = {}
        self.deselected: set[str] = set()
        self._path = path

    @classmethod
    def kept(cls, rows: Sequence[Row], path: Path) -> "States":
        """What is known from an earlier run."""
        states = cls(rows, path)
        if path.exists():
            kept = json.loads(path.read_text())
            states.outcomes, states.reasons = kept["outcomes"], kept["reasons"]
        return states

    def forget(self, *, only_unpassed: bool) -> None:
        """Drop the outcomes of what is run again: all cases of the rows, or those not passed."""
        tests = [test for row in self.rows for test in row.tests]
        ours = {case for test in tests for case in self.cases(test, self.outcomes)}
        self.outcomes = {
            case: outcome
            for case, outcome in self.outcomes.items()
            if (outcome == "passed" if only_unpassed else case not in ours)
        }

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        self.deselected |= {item.nodeid for item in items} - self.outcomes.keys()

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            if self.outcomes.get(report.nodeid) != "failed":
                self.outcomes[report.nodeid] = report.outcome
            if report.skipped and isinstance(report.longrepr, tuple):
                self.reasons[report.nodeid] = report.longrepr[2].removeprefix("Skipped: ")
            self._keep()
        if report.failed and self._path is not None:
            with self._path.with_suffix(".failures").open("a") as file:
                file.write(f"==== {report.nodeid}\n{report.longreprtext}\n")

    def _keep(self) -> None:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            beside = self._path.with_suffix(".new")
            beside.write_text(json.dumps({"outcomes": self.outcomes, "reasons": self.reasons}))
            beside.replace(self._path)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.section("reliability")
        terminalreporter.write_line(self.table())

    def cases(self, test: str, among: Any) -> list[str]:
        return [
            case for case in among if case == test or case.startswith((test + "[", test + "::"))
        ]

    def state(self, row: Row) -> str:
        ran = {case for test in row.tests for case in self.cases(test, self.outcomes)}
        left_out = {case for test in row.tests for case in self.cases(test, self.deselected)}
        found: dict[str, list[str]] = defaultdict(list)
        for case in sorted(ran):
            found[self.outcomes[case]].append(case)
        skipped = [self.reasons.get(case, "skipped") for case in found["skipped"]]
        skipped += ["left out by its marker"] * len(left_out)
        rest = f"; {len(skipped)} not run: {skipped[0]}" if skipped else ""
        if found["failed"]:
            return f"FAILED {len(found['failed'])} of {len(ran)}: {', '.join(found['failed'])}"
        if found["passed"]:
            return f"passed {len(found['passed'])}{rest}"
        if skipped:
            return f"not run here: {skipped[0]}"
        return "no test" if not row.tests else "not run here: nothing was collected"

    def table(self) -> str:
        lines = [f"{'row':4} {'fault':{NAMES_SHOWN}} state"]
        states = {row.name: self.state(row) for row in self.rows}
        for row in self.rows:
            gap = f" (not covered: {row.missing})" if row.missing else ""
            fault = (
                row.fault if len(row.fault) <= NAMES_SHOWN else row.fault[: NAMES_SHOWN - 2] + ".."
            )
            lines.append(f"{row.name:4} {fault:{NAMES_SHOWN}} {states[row.name]}{gap}")
        kinds = ("passed", "FAILED", "not run here", "no test")
        counts = [f"{sum(s.startswith(k) for s in states.values())} {k.lower()}" for k in kinds]
        return "\n".join([*lines, f"{len(self.rows)} rows: {', '.join(counts)}"])


def documented() -> str:
    """The table of docs/reliability.md."""
    lines = ["| row | fault | what holds | tests |", "|---|---|---|---|"]
    for row in ROWS:
        names = "<br>".join(f"`{test.removeprefix('tests/')}`" for test in row.tests)
        gap = f" Not covered: {row.missing}." if row.missing else ""
        lines.append(f"| {row.name} | {row.fault} | {row.promise}{gap} | {names} |")
    return "\n".join(lines) + "\n"


def with_table(text: str) -> str:
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + documented() + END + after


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*")
    parser.add_argument("--jobs", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--write-docs", action="store_true")
    parser.add_argument("--patience", type=float, default=6.0)
    chosen = parser.parse_args()
    if chosen.write_docs:
        DOCS.write_text(with_table(DOCS.read_text()))
        return 0
    known = {row.name: row for row in ROWS}
    unknown = [name for name in chosen.rows if name not in known]
    if unknown:
        parser.error(f"no such row: {', '.join(unknown)}; there are {', '.join(known)}")
    rows = [known[name] for name in chosen.rows] or list(ROWS)
    if chosen.show:
        sys.stdout.write(States.kept(rows, STATES).table() + "\n")
        return 0
    states = States(rows) if chosen.quick else States(rows, STATES)
    if chosen.resume or chosen.rows:  # parts add up
        states = States.kept(rows, STATES)
        states.forget(only_unpassed=chosen.resume)
    os.environ["TEST_PATIENCE"] = str(chosen.patience)
    tests = list(dict.fromkeys(test for row in rows for test in row.tests))
    markers = "not gpu and not slow" if chosen.quick else "not gpu"
    folder = [] if chosen.rows else ["tests/chaos"]
    jobs = 1 if chosen.quick else chosen.jobs  # what is left out is known to this process then
    beside = ["-n", str(jobs), "--dist", "worksteal"] if jobs > 1 else []
    left_out = [f"--deselect={case}" for case in states.outcomes if chosen.resume]
    return pytest.main([*tests, *folder, *beside, *left_out, "-m", markers], plugins=[states])


if __name__ == "__main__":
    sys.exit(main())

"""A pytest plugin: which lines of some folders each test executes (`-p executed_lines`).

`EXECUTED_LINES_OF` names the folders (separated by colons), `EXECUTED_LINES_FOLDER` where each
process writes what it saw: for each test that passed its seconds and, by file, its lines. Threads
are seen, child processes are not.
"""

import json
import os
import sys
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

FOLDERS = tuple(os.environ["EXECUTED_LINES_OF"].split(":"))
OUTPUT = Path(os.environ["EXECUTED_LINES_FOLDER"])
LINES: set[tuple[str, int]] = set()
NOTES: dict[str, dict[str, Any]] = {}

if sys.version_info >= (3, 12):
    MONITORING = sys.monitoring

    def on_line(code: Any, line: int) -> Any:
        if code.co_filename.startswith(FOLDERS):
            LINES.add((code.co_filename, line))
        return MONITORING.DISABLE

    MONITORING.use_tool_id(MONITORING.COVERAGE_ID, "executed_lines")
    MONITORING.register_callback(MONITORING.COVERAGE_ID, MONITORING.events.LINE, on_line)
    MONITORING.set_events(MONITORING.COVERAGE_ID, MONITORING.events.LINE)

    def start_again() -> None:
        MONITORING.restart_events()

else:

    def trace_lines(frame: Any, event: str, _: Any) -> Any:
        if event == "line":
            LINES.add((frame.f_code.co_filename, frame.f_lineno))
        return trace_lines

    def trace_calls(frame: Any, event: str, _: Any) -> Any:
        return trace_lines if frame.f_code.co_filename.startswith(FOLDERS) else None

    def start_again() -> None:
        """Each time: what a test calls may end tracing for good."""
        threading.settrace(trace_calls)
        sys.settrace(trace_calls)


def pytest_runtest_logstart(nodeid: str, location: Any) -> None:
    LINES.clear()
    NOTES[nodeid] = {"seconds": 0.0, "passed": True, "lines": {}}
    start_again()


def pytest_runtest_logreport(report: Any) -> None:
    note = NOTES[report.nodeid]
    note["seconds"] += report.duration
    note["passed"] = note["passed"] and report.outcome == "passed"
    if report.when == "teardown":
        lines = defaultdict(list)
        for path, line in sorted(LINES):
            lines[path].append(line)
        note["lines"] = dict(lines)


def pytest_sessionfinish(session: Any) -> None:
    if session.config.getoption("dist", "no") != "no":
        return  # this process only distributes tests
    used = {name: note for name, note in NOTES.items() if note["passed"]}
    (OUTPUT / f"{os.getpid()}.json").write_text(json.dumps(used))

"""A pytest plugin: which lines of some folders each test executes (`-p executed_lines`).

`EXECUTED_LINES_OF` names the folders (separated by colons), `EXECUTED_LINES_FOLDER` where each
process writes what it saw, every few seconds and at its end: for each test that passed its seconds
and, by file, its lines. What child processes execute while the test runs counts for it: each
appends the lines that are new to it to a file of the test process. Forked children do so by
themselves, others by a `sitecustomize.py` on their path that imports this module.
"""

import contextlib
import json
import os
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

FOLDERS = tuple(os.environ["EXECUTED_LINES_OF"].split(":"))
OUTPUT = Path(os.environ["EXECUTED_LINES_FOLDER"])
LINES: set[tuple[str, int]] = set()
NOTES: dict[str, dict[str, Any]] = {}
WRITE_EVERY_SECONDS = 15.0
WRITTEN_AT = [time.monotonic()]
IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
FILE_OF_CHILDREN = "EXECUTED_LINES_OF_CHILDREN"  # this variable names it
TEST_PROCESS = [0]


def note_line(path: str, line: int) -> None:
    if (path, line) in LINES:
        return
    LINES.add((path, line))
    if FILE_OF_CHILDREN in os.environ and os.getpid() != TEST_PROCESS[0]:
        # Opened each time: a child may close what it did not open, and may be killed.
        with contextlib.suppress(OSError), open(os.environ[FILE_OF_CHILDREN], "a") as output:
            output.write(f"{path}:{line}\n")


def take_lines_of_children() -> set[tuple[str, int]]:
    file = Path(os.environ[FILE_OF_CHILDREN])
    if not file.exists():
        return set()
    pairs = [text.rsplit(":", 1) for text in file.read_text().splitlines()]
    file.unlink()
    return {(path, int(line)) for path, line in pairs}


if sys.version_info >= (3, 12):
    MONITORING = sys.monitoring

    def on_line(code: Any, line: int) -> Any:
        if code.co_filename.startswith(FOLDERS):
            note_line(code.co_filename, line)
        return MONITORING.DISABLE

    MONITORING.use_tool_id(MONITORING.COVERAGE_ID, "executed_lines")
    MONITORING.register_callback(MONITORING.COVERAGE_ID, MONITORING.events.LINE, on_line)
    MONITORING.set_events(MONITORING.COVERAGE_ID, MONITORING.events.LINE)

    def start_again() -> None:
        MONITORING.restart_events()

else:

    def trace_lines(frame: Any, event: str, _: Any) -> Any:
        if event == "line":
            note_line(frame.f_code.co_filename, frame.f_lineno)
        return trace_lines

    def trace_calls(frame: Any, event: str, _: Any) -> Any:
        return trace_lines if frame.f_code.co_filename.startswith(FOLDERS) else None

    def start_again() -> None:
        """Each time: what a test calls may end tracing for good."""
        threading.settrace(trace_calls)
        sys.settrace(trace_calls)


if FILE_OF_CHILDREN in os.environ:
    start_again()


def pytest_configure() -> None:
    TEST_PROCESS[0] = os.getpid()
    os.environ[FILE_OF_CHILDREN] = str(OUTPUT / f"{os.getpid()}.lines")


def pytest_runtest_logstart(nodeid: str, location: Any) -> None:
    LINES.clear()
    take_lines_of_children()
    NOTES[nodeid] = {"seconds": 0.0, "passed": True, "is_ended": False, "lines": {}}
    start_again()


def pytest_runtest_logreport(report: Any) -> None:
    note = NOTES[report.nodeid]
    note["seconds"] += report.duration
    note["passed"] = note["passed"] and report.outcome == "passed"
    if report.when == "teardown":
        lines = defaultdict(list)
        for path, line in sorted(LINES | take_lines_of_children()):
            lines[path].append(line)
        note["lines"] = dict(lines)
        note["is_ended"] = True
        if IS_WORKER and time.monotonic() - WRITTEN_AT[-1] > WRITE_EVERY_SECONDS:
            write()


def pytest_sessionfinish(session: Any) -> None:
    if session.config.getoption("dist", "no") == "no":  # else it only distributes tests
        write()


def write() -> None:
    used = {name: note for name, note in NOTES.items() if note["passed"] and note["is_ended"]}
    part = OUTPUT / f"{os.getpid()}.json"
    draft = part.with_suffix(".draft")
    draft.write_text(json.dumps(used))
    draft.rename(part)
    WRITTEN_AT.append(time.monotonic())

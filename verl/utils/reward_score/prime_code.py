"""Code rewards in the local sandbox: does the program in a response pass its tests?

Where no sandbox can be had the functions raise `SandboxUnavailable`; programs never run without
one, and the failure is not a score. The cases of a program share one time limit: one that uses it
up has none left for later cases. Each case is a new process in a new sandbox. A statement about the
program runs in a second sandbox, beside the program's own:

    judge  ── calls, as JSON lines ──▶  program
    judge  ◀── values, as JSON lines ──  program        the judge's exit code is the verdict
"""

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from verl.utils.reward_score.code_programs import (
    NOT_JUDGED,
    function_program,
    judge_program,
    serving_program,
)
from verl.utils.reward_score.code_tests import (
    COMPILE_ERROR,
    CONTINUOUS_CASES,
    RUNTIME_ERROR,
    TIMEOUT,
    Case,
    Verdict,
    extract_code,
    is_right,
    read_cases,
    score_of,
)
from verl.utils.sandbox import Limits, RunResult, Sandbox

__path__: list[str] = []  # so that the older `prime_code.testing_util` is found

TIMEOUT_SECONDS = 10.0
"""Timeout of all cases of a program together."""


def compute_score(
    completion: str, test_cases: str | Mapping[str, Any], continuous: bool = False
) -> tuple[float, list[dict[str, Any]]]:
    """1.0 if the program passes all cases, else 0.0; `continuous`: the fraction of the first ten.

    The program is the last ```python block of the completion, else its first fenced block, else
    all of it. The second value says how each case went that was run.
    """
    extracted = extract_code(completion)
    program = completion if extracted is None else extracted
    cases = read_cases(test_cases)
    tests = LocalTests(program, timeout_seconds=TIMEOUT_SECONDS)
    metadata: list[dict[str, Any]] = []
    verdicts = _run(tests, cases[:CONTINUOUS_CASES] if continuous else cases, metadata)
    return score_of(verdicts, continuous=continuous), metadata


def apps_check_correctness(
    in_outs: str | Mapping[str, Any], generation: str, timeout: float = 10, debug: bool = True
) -> tuple[list[Verdict], list[dict[str, Any]]]:
    """The verdict on each case: True, False, -2 runtime error, -3 time-out, -4 compile error.

    `timeout` is for all cases together. `debug` is accepted for callers that pass it.
    """
    metadata: list[dict[str, Any]] = []
    tests = LocalTests(generation, timeout_seconds=timeout)
    return list(_run(tests, read_cases(in_outs), metadata)), metadata


def run_test(
    in_outs: str | Mapping[str, Any],
    test: str | None = None,
    debug: bool = False,
    timeout: float = 15,
) -> tuple[list[Verdict], list[dict[str, Any]]]:
    """`apps_check_correctness` under the name that callers of `testing_util` use."""
    return apps_check_correctness(in_outs, test or "", timeout=timeout)


def _failure(result: RunResult) -> Verdict:
    last_line = result.stderr.rstrip().rpartition(b"\n")[2]
    return COMPILE_ERROR if last_line.startswith(_COMPILE_ERRORS) else RUNTIME_ERROR


class LocalTests:
    def __init__(
        self, program: str, *, timeout_seconds: float, limits: Limits | None = None
    ) -> None:
        self.program = program
        self.limits = limits or Limits()
        self.seconds_left = float(timeout_seconds)
        self._sandbox = Sandbox()
        self._does_not_compile = False

    def run(self, case: Case) -> tuple[Verdict, dict[str, Any]]:
        """The verdict on a case, and a record of how it went."""
        if self._does_not_compile:
            return COMPILE_ERROR, _record(case, "compile_error_skipped")
        if self.seconds_left <= 0:
            return TIMEOUT, _record(case, "timeout_skipped")
        if case.assertion is None:
            result = self._run_program(case)
            verdict = _verdict(case, result)
        else:
            judged, result = self._run_judge(case.assertion)
            verdict = _verdict_of_judge(case, judged, result)
        self.seconds_left -= result.duration_seconds
        self._does_not_compile = verdict == COMPILE_ERROR
        return verdict, _record(case, _STATUS_NAMES[verdict], result)

    def _run_program(self, case: Case) -> RunResult:
        program = function_program(self.program, case.fn_name) if case.fn_name else self.program
        # Room for the right answer, whatever its length.
        needed = 2 * len(str(case.expected)) + 4096
        limits = replace(self._limits_left(), output_bytes=max(needed, self.limits.output_bytes))
        return self._sandbox.run(program, case.stdin.encode(errors="replace"), limits=limits)

    def _run_judge(self, assertion: str) -> tuple[RunResult, RunResult]:
        """How the judge ended, and how the program did."""
        calls, calls_end = os.pipe()
        values, values_end = os.pipe()
        limits = self._limits_left()

        def serve() -> RunResult:
            try:
                program = serving_program(self.program)
                return self._sandbox.run(program, calls, stdout=values_end, limits=limits)
            finally:  # the judge now reads the end of the values
                os.close(calls)
                os.close(values_end)

        with ThreadPoolExecutor() as thread:
            served = thread.submit(serve)
            try:
                program = judge_program(assertion)
                judged = self._sandbox.run(program, values, stdout=calls_end, limits=limits)
            finally:  # the program now reads the end of the calls
                os.close(values)
                os.close(calls_end)
            return judged, served.result(_END_SECONDS)

    def _limits_left(self) -> Limits:
        return replace(self.limits, timeout_seconds=self.seconds_left)


def _run(tests: LocalTests, cases: list[Case], metadata: list[dict[str, Any]]) -> Iterator[Verdict]:
    for case in cases:
        verdict, record = tests.run(case)
        metadata.append(record)
        yield verdict


_END_SECONDS = 60.0
_STATUS_NAMES = {True: "success", False: "wrong_answer", RUNTIME_ERROR: "runtime_error"} | {
    TIMEOUT: "timeout",
    COMPILE_ERROR: "compile_error",
}


_COMPILE_ERRORS = (b"SyntaxError:", b"IndentationError:", b"TabError:")


def _verdict(case: Case, result: RunResult) -> Verdict:
    if result.status == "timeout":
        return TIMEOUT
    if not result.is_finished:
        return _failure(result)
    return is_right(case, result.stdout)


def _verdict_of_judge(case: Case, judged: RunResult, result: RunResult) -> Verdict:
    """Only the judge's end counts; the program's says how it failed, if it did."""
    if judged.is_finished:
        return True
    if "timeout" in (judged.status, result.status):
        return TIMEOUT
    if judged.status == "failed" and judged.exit_code == NOT_JUDGED:
        raise ValueError(
            f"test case {case.index} cannot be judged: {judged.stderr.decode(errors='replace')!r}; "
            "it must be statements that call the program's functions with data, as "
            f"`assert f(2) == 4`; it is {case.assertion!r:.300}"
        )
    return False if result.is_finished else _failure(result)


def _record(case: Case, status: str, result: RunResult | None = None) -> dict[str, Any]:
    record: dict[str, Any] = {
        "case_index": case.index,
        "input": case.assertion or case.stdin,
        "expected_output": case.expected,
        "status": status,
    }
    if result is None:
        return record
    return record | {
        "stdout": result.stdout.decode("utf-8", errors="replace"),
        "stderr": result.stderr.decode("utf-8", errors="replace"),
        "exit_code": result.exit_code,
        "duration": result.duration_seconds,
    }

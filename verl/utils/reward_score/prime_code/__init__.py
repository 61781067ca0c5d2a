"""Code rewards: does the program in a response pass its tests? Run in the local sandbox.

Where no sandbox can be had the functions raise `SandboxUnavailable`; programs never run without
one, and the failure is not a score.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from verl.utils.reward_score.code_tests import (
    CONTINUOUS_CASES,
    Case,
    Verdict,
    extract_code,
    read_cases,
    score_of,
)
from verl.utils.reward_score.prime_code.local import LocalTests

TIMEOUT_SECONDS = 10.0
"""For all cases of a program together."""


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


def _run(tests: LocalTests, cases: list[Case], metadata: list[dict[str, Any]]) -> Iterator[Verdict]:
    for case in cases:
        verdict, record = tests.run(case)
        metadata.append(record)
        yield verdict


__all__ = ["apps_check_correctness", "compute_score"]

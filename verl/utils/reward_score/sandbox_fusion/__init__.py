"""Code rewards through a Sandbox Fusion service: does the program in a response pass its tests?

A service that fails says nothing about the program: `SandboxFusionError` is raised, and the reward
manager counts a fault instead of a score.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from verl.utils.reward_score.code_tests import (
    CONTINUOUS_CASES,
    SERVICE_ERROR,
    Case,
    Verdict,
    extract_code,
    read_cases,
    score_of,
)
from verl.utils.reward_score.sandbox_fusion.utils import DEFAULT_MEMORY_MB, RemoteTests, Semaphore
from verl.utils.sandbox import SandboxError


class SandboxFusionError(SandboxError):
    """The service did not answer, or failed itself."""


def compute_score(
    url: str,
    semaphore: Semaphore | None,
    memory_limit_mb: int | None,
    completion: str,
    test_cases: str | Mapping[str, Any],
    continuous: bool = False,
    timeout: float = 10,
) -> tuple[float, list[dict[str, Any]]]:
    """1.0 if the program passes all cases, else 0.0; `continuous`: the fraction of the first ten.

    The program is the last ```python block of the completion, else its first fenced block; a
    completion without one scores 0. `timeout` is for all cases together.
    """
    program = extract_code(completion)
    if program is None:
        return 0.0, [{"status": "no_code", "error": "the completion has no fenced code block"}]
    cases = read_cases(test_cases)
    tests = RemoteTests(
        url,
        program,
        timeout_seconds=timeout,
        memory_limit_mb=memory_limit_mb or DEFAULT_MEMORY_MB,
        semaphore=semaphore,
    )
    metadata: list[dict[str, Any]] = []
    verdicts = _run(tests, cases[:CONTINUOUS_CASES] if continuous else cases, metadata)
    return score_of(verdicts, continuous=continuous), metadata


def _run(
    tests: RemoteTests, cases: list[Case], metadata: list[dict[str, Any]]
) -> Iterator[Verdict]:
    for case in cases:
        verdict, record = tests.run(case)
        if verdict == SERVICE_ERROR:
            reason = record["api_request_error"] or f"status {record['api_status']}"
            raise SandboxFusionError(f"{tests.url} did not run test case {case.index}: {reason}")
        metadata.append(record)
        yield verdict


__all__ = ["SandboxFusionError", "compute_score"]

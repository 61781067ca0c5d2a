"""The verdict on each case, at the import path users know."""

from collections.abc import Mapping
from typing import Any

from verl.utils.reward_score.code_tests import Verdict, read_cases
from verl.utils.reward_score.sandbox_fusion.service import RemoteTests, Semaphore, call_sandbox_api


def check_correctness(
    sandbox_fusion_url: str,
    in_outs: str | Mapping[str, Any],
    generation: str,
    timeout: float = 10,
    memory_limit_mb: int = 1024,
    language: str = "python",
    concurrent_semaphore: Semaphore | None = None,
) -> tuple[list[Verdict], list[dict[str, Any]]]:
    """For each case True, False, -1 service error, -2 runtime error, -3 time-out, -4 compile error,
    and a record of how it went. `timeout` is for all cases together."""
    tests = RemoteTests(
        sandbox_fusion_url,
        generation,
        timeout_seconds=timeout,
        memory_limit_mb=memory_limit_mb,
        language=language,
        semaphore=concurrent_semaphore,
    )
    outcomes = [tests.run(case) for case in read_cases(in_outs)]
    return [verdict for verdict, _ in outcomes], [record for _, record in outcomes]


__all__ = ["call_sandbox_api", "check_correctness"]

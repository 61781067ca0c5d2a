"""One program and its test cases, run by a Sandbox Fusion service (`POST .../run_code`).

The cases share one time limit, as in the local sandbox. Only an overloaded gateway (HTTP 504) is
asked again. The service gets the program and the input; what is expected stays here.
"""

import functools
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol
from urllib.parse import urlsplit

from verl.utils.http_json import RequestFailed, post_json
from verl.utils.reward_score.code_programs import asserting_program, function_program
from verl.utils.reward_score.code_tests import (
    COMPILE_ERROR,
    RUNTIME_ERROR,
    SERVICE_ERROR,
    TIMEOUT,
    Case,
    Verdict,
    is_right,
    read_cases,
)


class Semaphore(Protocol):
    """Of `threading`, of `multiprocessing`, or a manager's."""

    def acquire(self, blocking: bool = ..., timeout: float = ..., /) -> bool: ...
    def release(self) -> Any: ...


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
    and a record of how it went. `timeout` is for all cases together. Data without cases is one
    service error."""
    if isinstance(in_outs, Mapping | None):
        inputs, outputs = ((in_outs or {}).get(name) for name in ("inputs", "outputs"))
        has_assertions = bool((in_outs or {}).get("assert_case"))
        if not has_assertions and (inputs is None or outputs is None):
            return [-1], [{"error": "Invalid input/output data"}]
        if not has_assertions and len(inputs or ()) != len(outputs or ()):
            return [-1], [{"error": "Input/output count mismatch"}]
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


DEFAULT_MEMORY_MB = 1024
MAX_RESPONSE_BYTES = 16 * 2**20
_PAUSES_SECONDS = (1.0, 2.0)
_EXTRA_SECONDS = 10.0
_TURN_SECONDS = 600.0  # to wait for a place among the concurrent requests


def call_sandbox_api(
    sandbox_fusion_url: str,
    code: str,
    stdin: str | None,
    compile_timeout: float,
    run_timeout: float,
    memory_limit_mb: int,
    language: str = "python",
) -> tuple[dict[str, Any] | None, str | None]:
    """The service's answer and None, or None and what went wrong."""
    payload = {
        "compile_timeout": compile_timeout,
        "run_timeout": run_timeout,
        "code": code,
        "stdin": stdin or "",
        "memory_limit_MB": memory_limit_mb,
        "language": language,
        "files": {},
        "fetch_files": [],
    }
    request = functools.partial(
        post_json,
        _endpoint(sandbox_fusion_url),
        payload,
        timeout_seconds=compile_timeout + run_timeout + _EXTRA_SECONDS,
        max_response_bytes=MAX_RESPONSE_BYTES,
    )
    try:
        answer = _until_gateway_answers(request)
    except RequestFailed as error:
        return None, str(error)
    return (answer, None) if isinstance(answer, dict) else (None, "the answer is no JSON object")


def _until_gateway_answers(request: Callable[[], Any]) -> Any:
    for pause_seconds in _PAUSES_SECONDS:
        try:
            return request()
        except RequestFailed as error:
            if error.status != 504:
                raise
        time.sleep(pause_seconds)
    return request()


def _endpoint(url: str) -> str:
    """An address without a path means the service's `run_code`."""
    return url.rstrip("/") + "/run_code" if urlsplit(url).path in ("", "/") else url


def _part(answer: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = answer.get(name)
    return part if isinstance(part, Mapping) else {}


def _seconds(part: Mapping[str, Any]) -> float | None:
    seconds = part.get("execution_time")
    return float(seconds) if isinstance(seconds, int | float) else None


class RemoteTests:
    def __init__(
        self,
        url: str,
        program: str,
        *,
        timeout_seconds: float,
        memory_limit_mb: int = DEFAULT_MEMORY_MB,
        language: str = "python",
        semaphore: Semaphore | None = None,
    ) -> None:
        self.url = url
        self.program = program
        self.seconds_left = float(timeout_seconds)
        self.memory_limit_mb = memory_limit_mb
        self.language = language
        self._semaphore = semaphore
        self._does_not_compile = False

    def run(self, case: Case) -> tuple[Verdict, dict[str, Any]]:
        """The verdict on a case, and a record of how it went."""
        record = _empty_record(case)
        if self._does_not_compile:
            return COMPILE_ERROR, record | {"status": "compile_error_skipped"}
        if self.seconds_left <= 0:
            return TIMEOUT, record | {"status": "timeout_skipped"}
        password = secrets.token_hex(16)
        started = time.monotonic()
        answer, error = self._ask(self._program_for(case, password), case.stdin)
        record |= {"api_request_error": error, "api_response": answer}
        if answer is None:
            return SERVICE_ERROR, record | {"status": "api_error"}
        record |= _read_answer(answer)
        verdict, status = _verdict(case, record, password)
        spent = time.monotonic() - started if record["duration"] is None else record["duration"]
        self.seconds_left = 0.0 if verdict == TIMEOUT else self.seconds_left - max(spent, 0.0)
        self._does_not_compile = verdict == COMPILE_ERROR
        return verdict, record | {"status": status}

    def _program_for(self, case: Case, password: str) -> str:
        if case.fn_name is None and case.assertion is None:
            return self.program
        if self.language != "python":
            raise ValueError(
                f"test case {case.index} calls functions, which works for python only; the "
                f"program is in {self.language!r}. Use cases with inputs and outputs as text"
            )
        if case.fn_name is not None:
            return function_program(self.program, case.fn_name)
        return asserting_program(self.program, str(case.assertion), password)

    def _ask(self, program: str, stdin: str) -> tuple[dict[str, Any] | None, str | None]:
        if self._semaphore is not None and not self._semaphore.acquire(True, _TURN_SECONDS):
            return None, f"no place among the concurrent requests within {_TURN_SECONDS} s"
        try:
            return call_sandbox_api(
                sandbox_fusion_url=self.url,
                code=program,
                stdin=stdin,
                compile_timeout=self.seconds_left,
                run_timeout=self.seconds_left,
                memory_limit_mb=self.memory_limit_mb,
                language=self.language,
            )
        finally:
            if self._semaphore is not None:
                self._semaphore.release()


def _empty_record(case: Case) -> dict[str, Any]:
    keys = (
        "api_request_error api_response status stdout stderr exit_code duration compile_duration "
        "compile_stderr api_status compile_status run_status"
    )
    return {
        "case_index": case.index,
        "input": case.assertion or case.stdin,
        "expected_output": case.expected,
    } | dict.fromkeys(keys.split())


def _read_answer(answer: Mapping[str, Any]) -> dict[str, Any]:
    compiled, run = _part(answer, "compile_result"), _part(answer, "run_result")
    return {
        "api_status": answer.get("status"),
        "compile_status": compiled.get("status"),
        "compile_duration": _seconds(compiled),
        "compile_stderr": compiled.get("stderr"),
        "run_status": run.get("status"),
        "stdout": run.get("stdout"),
        "stderr": run.get("stderr"),
        "exit_code": run.get("return_code"),
        "duration": _seconds(run),
    }


def _verdict(case: Case, record: Mapping[str, Any], password: str) -> tuple[Verdict, str]:
    """What the service's answer means for the program; anything unclear is the service's fault."""
    if record["api_status"] == "Success" and isinstance(record["stdout"], str):
        if case.assertion is None:
            right = is_right(case, record["stdout"].encode(errors="replace"))
        else:
            right = record["stdout"].split()[-1:] == [password]
        return right, "success" if right else "wrong_answer"
    if record["api_status"] != "Failed":
        return SERVICE_ERROR, "sandbox_error"
    if record["compile_status"] not in (None, "Finished"):
        is_late = record["compile_status"] == "TimeLimitExceeded"
        return COMPILE_ERROR, "compile_timeout" if is_late else "compile_error"
    if record["run_status"] == "TimeLimitExceeded":
        return TIMEOUT, "timeout"
    if record["run_status"] in ("Error", "Finished"):
        return RUNTIME_ERROR, "runtime_error"
    return SERVICE_ERROR, "sandbox_error"

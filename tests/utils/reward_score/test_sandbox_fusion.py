"""Scores of programs that a Sandbox Fusion service runs; its failures are never scores."""

import json
import threading
import time
from collections.abc import Iterator

import pytest

from tests.pace import pace
from tests.utils.reward_score.fusion_server import FusionServer, running_server
from tests.utils.sandbox.needs import require_namespaces
from verl.utils.reward_score import sandbox_fusion
from verl.utils.reward_score.sandbox_fusion import SandboxFusionError
from verl.utils.reward_score.sandbox_fusion.utils import (
    Case,
    RequestFailed,
    _empty_record,
    call_sandbox_api,
    check_correctness,
    post_json,
)

DOUBLE = {"inputs": ["1", "2", "3", "4"], "outputs": ["2", "4", "6", "8"]}
RIGHT = "print(int(input()) * 2)"
HALF_RIGHT = "n = int(input()); print(n * 2 if n < 3 else 0)"


@pytest.fixture
def server() -> Iterator[FusionServer]:
    require_namespaces()
    with running_server() as server:
        yield server


def score(server: FusionServer, program: str, *, continuous: bool = False) -> float:
    completion = f"Here it is:\n```python\n{program}\n```\nDone."
    return sandbox_fusion.compute_score(
        server.url, None, None, completion, json.dumps(DOUBLE), continuous=continuous
    )[0]


def test_a_request_has_the_fields_of_the_protocol(server):
    answer, error = call_sandbox_api(server.url, "print(input())", "hi", 5, 6, 512)
    assert error is None
    assert answer is not None
    assert answer["run_result"]["stdout"] == "hi\n"
    assert server.requests == [
        {
            "compile_timeout": 5,
            "run_timeout": 6,
            "code": "print(input())",
            "stdin": "hi",
            "memory_limit_MB": 512,
            "language": "python",
            "files": {},
            "fetch_files": [],
        }
    ]


def test_an_address_without_a_path_means_run_code(server):
    for address in (server.address, server.address + "/", server.url, server.address + "/other"):
        call_sandbox_api(address, "", "", 5, 5, 512)
    assert server.paths == ["/run_code"] * 3 + ["/other"]


def test_scores_are_all_or_nothing_or_a_fraction(server):
    assert score(server, RIGHT) == 1.0
    assert score(server, HALF_RIGHT) == 0.0
    assert score(server, HALF_RIGHT, continuous=True) == 0.5


def test_expected_outputs_are_never_sent(server):
    table = {"inputs": ["1"], "outputs": ["the answer is 31337"]}
    check_correctness(server.url, table, "print(1)")
    check_correctness(server.url, table | {"fn_name": "f"}, "def f(x): return x")
    assert "31337" not in json.dumps(server.requests)


def test_each_outcome_has_its_number_and_its_record(server):
    program = """
import sys, time
word = input()
if word == "raise":
    raise KeyError
if word == "sleep":
    time.sleep(100)
print(word)
"""
    table = {"inputs": ["ok", "no", "raise", "sleep", "late"], "outputs": ["ok"] * 5}
    verdicts, metadata = check_correctness(server.url, table, program, timeout=2 * pace())
    assert verdicts == [True, False, -2, -3, -3]
    statuses = ["success", "wrong_answer", "runtime_error", "timeout", "timeout_skipped"]
    assert [record["status"] for record in metadata] == statuses
    assert len(server.requests) == 4
    keys = (
        "case_index input expected_output api_request_error api_response status stdout stderr "
        "exit_code duration compile_duration compile_stderr api_status compile_status run_status"
    )
    assert all(set(record) == set(keys.split()) for record in metadata)
    assert (metadata[2]["exit_code"], metadata[2]["run_status"]) == (1, "Error")


def test_a_record_names_its_case_before_anything_is_known():
    record = _empty_record(Case(index=2, stdin="1", expected="2"))
    known = {"case_index": 2, "input": "1", "expected_output": "2"}
    assert {name: value for name, value in record.items() if value is not None} == known
    assert len(record) == 15
    assert _empty_record(Case(0, "", None, assertion="assert f(1)"))["input"] == "assert f(1)"


def test_a_compile_error_marks_all_later_cases(server):
    verdicts, metadata = check_correctness(server.url, DOUBLE, "int main(", language="cpp")
    assert verdicts == [-4] * 4
    assert metadata[0]["compile_stderr"] == "error"
    statuses = ["compile_error"] + ["compile_error_skipped"] * 3
    assert [record["status"] for record in metadata] == statuses
    assert len(server.requests) == 1


def test_functions_and_assertions_are_judged(server):
    program = "def f(x): return x * x"
    table = {"inputs": ["2", "3"], "outputs": ["4", "8"], "fn_name": "f"}
    assert check_correctness(server.url, table, program)[0] == [True, False]
    statements = {"assert_case": ["assert f(2) == 4", "assert f(3) == 8"]}
    assert check_correctness(server.url, statements, program)[0] == [True, -2]


@pytest.mark.parametrize(
    "attack",
    [
        "import os; os._exit(0)",
        "import sys; sys.exit(0)",
        "print('True')\nimport os\ndef f(x): os._exit(0)",
        "import sys\nsys.excepthook = lambda *a: None\ndef f(x): return 1",
    ],
)
def test_leaving_early_does_not_pass_an_assertion(server, attack):
    verdicts, _ = check_correctness(server.url, {"assert_case": ["assert f(2) == 4"]}, attack)
    assert verdicts[0] in (False, -2)


def test_functions_in_another_language_are_refused(server):
    table = {"inputs": ["2"], "outputs": ["4"], "fn_name": "f"}
    with pytest.raises(ValueError, match="works for python only"):
        check_correctness(server.url, table, "", language="cpp")


def test_a_completion_without_code_scores_zero_and_nothing_is_sent(server):
    assert sandbox_fusion.compute_score(server.url, None, 1024, "no code", DOUBLE)[0] == 0.0
    assert server.requests == []


def test_only_a_gateway_time_out_is_asked_again(server):
    server.faults = [504]
    start = time.monotonic()
    answer, error = call_sandbox_api(server.url, "print(1)", "", 5, 5, 512)
    assert error is None
    assert answer is not None
    assert answer["status"] == "Success"
    assert time.monotonic() - start >= 1.0
    assert len(server.requests) == 2
    server.faults = [500]
    assert call_sandbox_api(server.url, "", "", 5, 5, 512) == (None, "HTTP 500: gateway")
    assert len(server.requests) == 3


@pytest.mark.slow
def test_a_gateway_that_stays_away_is_given_up_after_three_attempts(server):
    server.faults = [504, 504, 504]
    assert call_sandbox_api(server.url, "", "", 5, 5, 512) == (None, "HTTP 504: gateway")
    assert len(server.requests) == 3


def answer_of(**fields: object) -> bytes:
    return json.dumps(fields).encode()


FAULTS = {
    "refused": (500, "HTTP 500"),
    "unavailable": (503, "HTTP 503"),
    "redirect": (302, "HTTP 302"),
    "garbage": (b"<html>", "not JSON"),
    "cut off": (b'{"status": "Succ', "not JSON"),
    "no object": (b"[1]", "no JSON object"),
    "no status": (b"{}", "status None"),
    "own failure": (answer_of(status="SandboxError", message="disk full"), "status SandboxError"),
    "unknown status": (answer_of(status="Maybe"), "status Maybe"),
    "success without output": (answer_of(status="Success", run_result=None), "status Success"),
    "failure without cause": (answer_of(status="Failed", run_result={}), "status Failed"),
    "hangs up": (lambda handler: handler.connection.close(), "RemoteDisconnected|reset|closed"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_service_is_an_error_and_never_a_score(server, fault):
    behaviour, message = FAULTS[fault]
    server.faults = [b'{"status": "Success", "run_result": {"stdout": "2"}}', behaviour]
    with pytest.raises(SandboxFusionError, match=f"did not run test case 1: .*({message})"):
        score(server, RIGHT, continuous=True)
    server.faults = [behaviour]
    table = {"inputs": ["1", "2"], "outputs": ["2", "4"]}
    assert check_correctness(server.url, table, RIGHT)[0] == [-1, True]


def test_a_service_that_is_not_there_is_an_error():
    with pytest.raises(SandboxFusionError, match="ConnectionRefusedError"):
        sandbox_fusion.compute_score("http://127.0.0.1:9", None, 1024, f"```\n{RIGHT}\n```", DOUBLE)


def test_an_address_that_is_none_is_named():
    with pytest.raises(ValueError, match="'localhost:8080'; it must begin with http://"):
        call_sandbox_api("localhost:8080", "", "", 5, 5, 512)


def test_an_answer_that_drips_is_cut_at_the_deadline(server):
    def drip(handler) -> None:
        handler.wfile.write(b"HTTP/1.0 200 OK\r\n")
        for _ in range(1200):
            handler.wfile.write(b"X: y\r\n")
            handler.wfile.flush()
            time.sleep(0.05)

    server.faults = [quiet(drip)]
    start = time.monotonic()
    with pytest.raises(RequestFailed, match=r"no answer within 0\.4 s"):
        post_json(server.url, {}, timeout_seconds=0.4, max_response_bytes=100)
    assert time.monotonic() - start < 59  # all of it takes 60 s


def test_an_answer_beyond_the_limit_is_not_read(server):
    server.faults = [b'"' + b"x" * 1000 + b'"']
    with pytest.raises(RequestFailed, match="more than 1001 bytes"):
        post_json(server.url, {}, timeout_seconds=5, max_response_bytes=1001)


def quiet(behaviour):
    """The client hangs up on purpose; that is no error of the server."""

    def behave(handler) -> None:
        try:
            behaviour(handler)
        except OSError:
            handler.close_connection = True

    return behave


def test_a_semaphore_bounds_the_requests_at_one_time(server):
    semaphore = threading.Semaphore(2)
    completion = f"```python\n{RIGHT}\n```"
    table = {"inputs": ["1", "2"], "outputs": ["2", "4"]}
    scores = []

    def grade() -> None:
        scores.append(
            sandbox_fusion.compute_score(server.url, semaphore, 512, completion, table)[0]
        )

    threads = [threading.Thread(target=grade) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert scores == [1.0] * 4
    assert server.most_at_once <= 2
    assert semaphore.acquire(False)
    assert semaphore.acquire(False)

"""Scores of programs that are run in the local sandbox."""

import asyncio
import json
import os
import threading

import pytest

from tests.pace import pace
from tests.utils.sandbox.needs import require_namespaces
from verl.utils.reward_score import default_compute_score, prime_code
from verl.utils.reward_score.prime_code import apps_check_correctness
from verl.workers.reward_manager.grader import InfraError
from verl.workers.reward_manager.workers import grade_of

DOUBLE = {"inputs": ["1", "2", "3", "4"], "outputs": ["2", "4", "6", "8"]}
RIGHT = "print(int(input()) * 2)"
HALF_RIGHT = "n = int(input()); print(n * 2 if n < 3 else 0)"


@pytest.fixture(autouse=True)
def _needs_a_sandbox() -> None:
    require_namespaces()


def test_all_cases_must_pass_for_a_score():
    assert prime_code.compute_score(f"```python\n{RIGHT}\n```", DOUBLE)[0] == 1.0
    assert prime_code.compute_score(f"```python\n{HALF_RIGHT}\n```", DOUBLE)[0] == 0.0


def test_a_continuous_score_is_the_fraction_of_cases_passed():
    score, metadata = prime_code.compute_score(HALF_RIGHT, json.dumps(DOUBLE), continuous=True)
    assert score == 0.5
    statuses = ["success", "success", "wrong_answer", "wrong_answer"]
    assert [record["status"] for record in metadata] == statuses


def test_a_continuous_score_looks_at_the_first_ten_cases():
    numbers = [str(n) for n in range(12)]
    program = "n = int(input()); print(n if n < 5 else -1)"
    score, metadata = prime_code.compute_score(
        program, {"inputs": numbers, "outputs": numbers}, continuous=True
    )
    assert (score, len(metadata)) == (0.5, 10)


def test_after_the_first_failure_nothing_more_is_run_for_an_all_or_nothing_score():
    _, metadata = prime_code.compute_score("print(0)", DOUBLE)
    assert len(metadata) == 1


def test_each_way_to_fail_has_its_number():
    table = {"inputs": ["ok", "wrong", "raise", "exit"], "outputs": ["ok"] * 4}
    program = """
import sys
word = input()
if word == "raise":
    raise KeyError
if word == "exit":
    sys.exit(4)
print(word)
"""
    verdicts, metadata = apps_check_correctness(table, program)
    assert verdicts == [True, False, -2, -2]
    assert [record["exit_code"] for record in metadata] == [0, 0, 1, 4]
    assert metadata[2]["stderr"].endswith("KeyError\n")


def test_a_program_that_does_not_compile_is_run_once():
    verdicts, metadata = apps_check_correctness(DOUBLE, "print(")
    assert verdicts == [-4] * 4
    statuses = [record["status"] for record in metadata]
    assert statuses == ["compile_error"] + ["compile_error_skipped"] * 3


def test_the_time_limit_is_for_all_cases_together():
    table = {"inputs": ["1"] * 10, "outputs": ["1"] * 10}
    verdicts, metadata = apps_check_correctness(table, "while True: pass", timeout=0.6)
    assert verdicts == [-3] * 10
    assert [record["status"] for record in metadata[1:]] == ["timeout_skipped"] * 9


def test_time_used_by_early_cases_is_gone_for_later_ones():
    limit = 2 * pace()
    table = {"inputs": [f"{0.5 * limit}", f"{0.8 * limit}"]}  # each of them would be in time
    table["outputs"] = table["inputs"]
    program = "import time; text = input(); time.sleep(float(text)); print(text)"
    verdicts, _ = apps_check_correctness(table, program, timeout=limit)
    assert verdicts == [True, -3]


ADD = {"inputs": ["[1, 2]\n3", [[], 1]], "outputs": ["[4, 5]", [[]]], "fn_name": "add"}


@pytest.mark.parametrize(
    "program",
    [
        "def add(numbers, n): return [x + n for x in numbers]",
        "def add(numbers: List[int], n): return tuple(x + n for x in numbers)",
        "class Solution:\n  def add(self, numbers, n): return [x + n for x in numbers]",
        "import numpy as np\ndef add(numbers, n): return np.array(numbers, dtype=int) + n",
        "def add(numbers, n):\n  print('debug')\n  return [x + n for x in numbers]",
        "def add(a, n): return [x + n for x in a]\nif __name__ == '__main__': input()",
    ],
)
def test_a_function_is_called_with_its_arguments(program):
    assert apps_check_correctness(ADD, program)[0] == [True, True]


@pytest.mark.parametrize(
    ("program", "verdict"),
    [
        ("def add(numbers, n): return numbers", False),
        ("def add(numbers, n): print([4, 5])", False),
        ("def other(numbers, n): return [4, 5]", -2),
        ("def add(numbers): return [4, 5]", -2),
    ],
)
def test_a_function_that_gives_something_else_fails(program, verdict):
    assert apps_check_correctness(ADD, program)[0][0] == verdict


def test_assertions_may_loop_import_and_expect_errors():
    table = {
        "assert_case": [
            "assert square(3) == 9",
            "import math\nassert math.isclose(square(0.1), 0.01)",
            "def check(f):\n  for n in range(5):\n    assert f(n) == n * n\ncheck(square)",
            "assert {square(2), square(-2)} == {4} and square(x=2) != (4,)",
            "try:\n  square(None)\n  assert False\nexcept TypeError:\n  pass",
            "counter = Counter()\ncounter.add(2)\ncounter.add(3)\nassert counter.total == 5",
            "a, b = Counter(), Counter()\na.add(2)\nb.add(3)\nassert (a.total, b.total) == (2, 3)",
            "assert square(4) == 15",
        ]
    }
    program = """
def square(x): return x * x
class Counter:
    total = 0
    def add(self, n): self.total += n
"""
    assert apps_check_correctness(table, program)[0] == [True] * 7 + [False]


def test_values_keep_their_kind_on_the_way_to_the_judge():
    table = {"assert_case": ["assert f(1) == (1, [1], {1}, {1: None}, b'b', 1j, 0.5)"]}
    program = (
        "import numpy\ndef f(x): return (x, [x], {x}, {x: None}, b'b', 1j, numpy.float64(0.5))"
    )
    assert apps_check_correctness(table, program)[0] == [True]
    table = {"assert_case": ["assert f(1) == [1]"]}
    assert apps_check_correctness(table, "def f(x): return (x,)")[0] == [False]


@pytest.mark.parametrize(
    ("assertion", "reason"),
    [
        ("assert f(", "SyntaxError"),
        ("import nonexistent_package\nassert f(1)", "ModuleNotFoundError"),
        ("assert 1 == 1", "it says nothing about the solution"),
        ("assert f(object()) == 1", "an argument of the solution is object"),
    ],
)
def test_an_assertion_that_cannot_be_judged_is_an_error_and_not_a_score(assertion, reason):
    with pytest.raises(ValueError, match=rf"(?s)test case 0 cannot be judged.*{reason}"):
        prime_code.compute_score("def f(x): return 1", {"assert_case": [assertion]})


def test_judging_leaves_no_thread_and_no_descriptor_behind():
    table = {"assert_case": ["assert f(1) == 1"] * 3}
    before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    assert apps_check_correctness(table, "def f(x): return x")[0] == [True] * 3
    num_threads, num_files = before  # those of tests before this one may end meanwhile
    assert threading.active_count() <= num_threads
    assert len(os.listdir("/proc/self/fd")) <= num_files


def test_an_endless_solution_is_a_time_out_for_an_assertion():
    table = {"assert_case": ["assert f(1) == 1", "assert f(2) == 2"]}
    verdicts, _ = apps_check_correctness(table, "def f(x):\n  while True: pass", timeout=0.6)
    assert verdicts == [-3, -3]


def test_a_right_answer_longer_than_the_output_limit_passes():
    expected = " ".join(str(n) for n in range(20_000))
    table = {"inputs": ["20000"], "outputs": [expected]}
    assert prime_code.compute_score("print(*range(int(input())))", table)[0] == 1.0


def test_text_that_is_no_code_scores_zero():
    assert prime_code.compute_score("I cannot solve this.", DOUBLE)[0] == 0.0


def test_the_data_source_leads_here_and_a_broken_service_is_a_fault_of_the_grader():
    solution = f"```python\n{HALF_RIGHT}\n```"
    row = {"data_source": "apps", "solution_str": solution, "ground_truth": json.dumps(DOUBLE)}
    assert default_compute_score(**row) == 0.5
    arguments = row | {"sandbox_fusion_url": "http://127.0.0.1:9"}
    loop = asyncio.new_event_loop()
    fault = grade_of(default_compute_score, arguments, loop)
    loop.close()
    assert isinstance(fault, InfraError)
    assert "did not run test case 0" in fault.reason

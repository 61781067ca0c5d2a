"""math-verify in a worker that can be killed."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.utils.reward_score.math_grader.hostile import injections
from verl.utils.import_utils import is_available
from verl.utils.py_functional import call_in_child
from verl.utils.reward_score import math_verify
from verl.utils.reward_score.math_grader import Abstain, Correct, Wrong

needs_package = pytest.mark.skipif(
    not is_available("math_verify"), reason="math-verify is not installed"
)
NEVER_ENDS = r"\boxed{9^{9^{9^{9}}}}"


@pytest.fixture(scope="module", autouse=True)
def _no_worker_left():
    yield
    math_verify.close_workers()


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    monkeypatch.setattr(math_verify, "DEADLINE_SECONDS", 60.0)  # the CPU may have others to serve


def workers() -> set[int]:
    """Children of this process that run the worker script."""
    found = set()
    for status in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            is_worker = b"math_verify_worker" in status.read_bytes()
            parent = int(status.with_name("stat").read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        if is_worker and parent == os.getpid():
            found.add(int(status.parent.name))
    return found


def only_worker() -> int:
    if len(workers()) > 1:
        math_verify.close_workers()
    math_verify.second_opinion(r"\boxed{1}", "1")
    (pid,) = workers()
    return pid


@needs_package
def test_it_gives_a_verdict_and_keeps_its_worker():
    assert math_verify.second_opinion(r"so \boxed{\frac{1}{2}}", "0.5") == Correct()
    before = workers()
    assert isinstance(math_verify.second_opinion(r"so \boxed{3}", "0.5"), Wrong)
    assert workers() == before != set()
    assert math_verify.compute_score(r"\boxed{4}", "4") == 1.0
    assert math_verify.compute_score(r"\boxed{5}", "4") == 0.0


@needs_package
def test_a_worker_that_computes_too_long_ends_and_is_replaced():
    pid = only_worker()
    verdict = math_verify.second_opinion(NEVER_ENDS, "5")
    assert verdict == Abstain("math-verify took more than 1 s of CPU time")
    assert pid not in workers()
    assert math_verify.second_opinion(r"\boxed{1}", "1") == Correct()
    assert workers() != {pid}


@needs_package
def test_only_the_public_function_turns_a_kill_into_a_number():
    assert math_verify.compute_score(NEVER_ENDS, "5", timeout_score=-0.25) == -0.25


@needs_package
def test_a_worker_has_its_memory_limit():
    pid = only_worker()
    (limit,) = [
        line.split()[3:5]
        for line in Path(f"/proc/{pid}/limits").read_text().splitlines()
        if line.startswith("Max address space")
    ]
    assert limit == [str(math_verify.MEMORY_MB * 2**20)] * 2


@needs_package
def test_a_worker_killed_from_outside_is_no_verdict_and_is_replaced():
    pid = only_worker()
    os.kill(pid, 9)
    assert isinstance(math_verify.second_opinion(r"\boxed{1}", "1"), Abstain)
    assert math_verify.second_opinion(r"\boxed{1}", "1") == Correct()


@needs_package
@pytest.mark.slow
def test_threads_ask_workers_of_their_own():
    with ThreadPoolExecutor(3) as threads:
        futures = [
            threads.submit(math_verify.second_opinion, rf"\boxed{{{k}}}", str(k % 5))
            for k in range(15)
        ]
        verdicts = [future.result(timeout=60) for future in futures]
    assert [isinstance(verdict, Correct) for verdict in verdicts] == [k < 5 for k in range(15)]


@needs_package
@pytest.mark.slow
def test_a_forked_child_asks_a_worker_of_its_own():
    pid = only_worker()

    def verdict_and_workers() -> tuple:
        return math_verify.second_opinion(r"\boxed{2}", "2"), workers()

    verdict, own = call_in_child(verdict_and_workers, seconds=60, name="second opinion")
    assert verdict == Correct()
    assert len(own) == 1
    assert pid not in own
    assert math_verify.second_opinion(r"\boxed{1}", "1") == Correct()


@needs_package
def test_closing_ends_the_workers():
    math_verify.second_opinion(r"\boxed{1}", "1")
    math_verify.close_workers()
    assert workers() == set()


@needs_package
def test_a_gold_answer_that_is_too_long_is_not_cut():
    assert math_verify.second_opinion(r"\boxed{1}", "1" * 3000) == Abstain(
        "the gold answer has more than 2000 characters"
    )


@needs_package
def test_two_hundred_injections_execute_nothing_in_a_worker(tmp_path):
    tmp_path.chmod(0o777)
    texts = [text.replace("{mark}", str(tmp_path / "mark")) for text in injections()]
    assert len(set(texts)) == 200
    for text in texts:
        assert math_verify.grade_or_ask(f"\\int {text} dx", "5") != Correct()
        math_verify.second_opinion(text, "5")
    assert list(tmp_path.iterdir()) == []


@needs_package
@pytest.mark.parametrize(
    "answer",
    [
        r"\sum_{k=1}^{10^{9}} k!",
        pytest.param(r"\int_0^{9^{9^9}} x^{x^x} dx", marks=pytest.mark.slow),
        pytest.param(r"\prod_{k=1}^{10^7} k", marks=pytest.mark.slow),
    ],
)
def test_what_takes_too_long_in_a_worker_is_an_abstention(answer):
    assert math_verify.grade_or_ask(answer, "5") == Abstain(
        "math-verify took more than 1 s of CPU time"
    )


@needs_package
def test_what_it_cannot_read_is_an_abstention():
    assert math_verify.grade_or_ask(r"\int \unknown", "5") == Abstain(
        "math-verify failed: ValueError: it cannot read the answer"
    )


@needs_package
@pytest.mark.parametrize(
    "answer",
    [
        "5!!",
        "9^{9^{9^9}}",
        r"\int x = 5",
        r"\int x, 5",
        r"\sum_{k} print(5)",
        "(" * 30 + "5" + ")" * 30,
    ],
)
def test_it_is_asked_only_about_what_it_evaluates(answer):
    math_verify.close_workers()
    assert isinstance(math_verify.grade_or_ask(answer, "5"), Abstain)
    assert workers() == set()


WITHOUT_PACKAGE = r"""
import sys
from verl.utils.reward_score import math_verify
sys.path.clear()  # nothing else can be imported from here on
try:
    math_verify.compute_score("5", "5")
except ImportError as error:
    print(error)
print(math_verify.grade_or_ask(r"\int_0^5 dx", "5"))
"""


def test_without_the_package_it_is_refused_by_name():
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_PACKAGE],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert "needs the package math-verify, which is not installed" in result.stdout
    assert "pip install verl[math]" in result.stdout
    assert "Abstain(reason='the command \\\\int is not known')" in result.stdout

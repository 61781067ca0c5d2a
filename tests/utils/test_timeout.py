import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from verl.utils.py_functional import timeout_limit

# From Python 3.12 on, forking a process with threads warns; here that is the point.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")


@timeout_limit(0.3)
def sleep(seconds: float) -> str:
    time.sleep(seconds)
    return "awake"


def seconds_until_timeout(call, *args) -> float:
    start = time.monotonic()
    with pytest.raises(TimeoutError, match="took longer than"):
        call(*args)
    return time.monotonic() - start


def test_a_quick_call_returns_its_value():
    assert sleep(0.0) == "awake"


def test_a_slow_call_is_cut_off():
    assert 0.3 <= seconds_until_timeout(sleep, 60) < 2


def test_the_limit_holds_in_any_thread():
    elapsed = []
    thread = threading.Thread(target=lambda: elapsed.append(seconds_until_timeout(sleep, 60)))
    thread.start()
    thread.join(timeout=10)
    assert elapsed[0] < 2


def test_a_call_that_never_lets_go_of_the_interpreter_is_cut_off():
    @timeout_limit(0.3)
    def backtrack() -> object:
        return re.match(r"(a+)+$", "a" * 64 + "b")

    assert seconds_until_timeout(backtrack) < 2


def test_processes_it_started_die_with_it(tmp_path):
    note = tmp_path / "pid"

    @timeout_limit(2)
    def start_and_wait() -> None:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        note.write_text(str(child.pid))
        child.wait(60)

    seconds_until_timeout(start_and_wait)
    pid = int(note.read_text())
    for _ in range(50):
        if not is_running(pid):
            return
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    pytest.fail("the grandchild outlived the limit")


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_an_exception_comes_back_with_its_traceback():
    @timeout_limit(5)
    def fail() -> None:
        raise KeyError("missing")

    with pytest.raises(KeyError, match="missing") as caught:
        fail()
    assert "in fail" in str(caught.value.__cause__)


def test_an_end_of_file_error_is_the_functions_own():
    @timeout_limit(5)
    def fail() -> None:
        raise EOFError("mine")

    with pytest.raises(EOFError, match="mine"):
        fail()


def test_an_exception_that_cannot_travel_is_described(capfd):
    class Stubborn(Exception):
        pass

    @timeout_limit(5)
    def fail() -> None:
        raise Stubborn("details")

    with pytest.raises(RuntimeError, match="details"):
        fail()


def test_a_child_that_dies_is_not_waited_for():
    @timeout_limit(60)
    def die() -> None:
        os._exit(3)

    with pytest.raises(RuntimeError, match="exit code 3"):
        die()


def test_a_large_result_arrives():
    @timeout_limit(30)
    def large() -> bytes:
        return b"x" * 5_000_000

    assert len(large()) == 5_000_000


def test_a_signal_interrupts_in_place_and_is_removed():
    before = signal.getsignal(signal.SIGALRM)
    timer = signal.getitimer(signal.ITIMER_REAL)[0]  # the test runner's own limit, if it has one
    seen = []

    @timeout_limit(0.2, use_signals=True)
    def slow() -> None:
        seen.append("ran here")
        time.sleep(60)

    assert seconds_until_timeout(slow) < 2
    assert seen == ["ran here"]
    assert signal.getsignal(signal.SIGALRM) is before
    left = signal.getitimer(signal.ITIMER_REAL)[0]
    assert left == (pytest.approx(timer - 0.2, abs=0.15) if timer else 0)


def test_of_two_nested_alarms_the_earlier_rings():
    inner = timeout_limit(60, use_signals=True)(time.sleep)

    @timeout_limit(0.3, use_signals=True)
    def outer() -> None:
        inner(60)

    assert seconds_until_timeout(outer) < 2


def test_signals_outside_the_main_thread_are_refused():
    limited = timeout_limit(1, use_signals=True)(time.sleep)
    errors = []

    def run() -> None:
        try:
            limited(0)
        except ValueError as error:
            errors.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(timeout=10)
    assert "only in the main thread" in errors[0]


def test_a_limit_must_be_positive():
    with pytest.raises(ValueError, match="got 0"):
        timeout_limit(0)

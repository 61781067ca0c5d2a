import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from omegaconf import OmegaConf

from tests.pace import pace, wait_until
from verl.utils.py_functional import (
    DynamicEnum,
    NestedNamespace,
    append_to_dict,
    convert_to_regular_types,
    printable,
    rename_dict,
    temp_env_var,
    timeout_limit,
    union_two_dict,
)


class Color(DynamicEnum):
    pass


class Shape(DynamicEnum):
    pass


RED = Color.register("red")


def test_metrics_of_several_steps_become_lists():
    collected: dict = {}
    append_to_dict(collected, {"loss": 1.0, "actor/lr": 0.5}, prefix="actor/")
    append_to_dict(collected, {"loss": [2.0, 3.0]}, prefix="actor/")
    assert collected == {"actor/loss": [1.0, 2.0, 3.0], "actor/lr": [0.5]}


def test_a_prefix_is_added_once():
    assert rename_dict({"loss": 1, "val/acc": 2}, "val/") == {"val/loss": 1, "val/acc": 2}


def test_dictionaries_join_where_they_agree():
    left = {"a": 1, "b": np.array([1, 2])}
    assert union_two_dict(left, {"b": np.array([1, 2]), "c": 3}) is left
    assert left["a"] == 1
    assert left["c"] == 3


def test_dictionaries_that_disagree_are_refused_and_stay_as_they_were():
    left = {"a": 1}
    with pytest.raises(ValueError, match=r"disagree on 'a': 1 and 2"):
        union_two_dict(left, {"c": 3, "a": 2})
    assert left == {"a": 1}


def test_omegaconf_disappears_at_any_depth():
    config = OmegaConf.create({"a": {"b": [1, 2]}, "c": "${a.b}"})
    regular = convert_to_regular_types({"x": [config, config.a.b]})
    assert regular == {"x": [{"a": {"b": [1, 2]}, "c": [1, 2]}, [1, 2]]}
    assert type(regular["x"][0]["a"]) is dict
    assert type(regular["x"][1]) is list


def test_a_nested_dictionary_reads_as_attributes():
    space = NestedNamespace({"a": {"b": 1}, "c": [2]}, d=3)
    assert (space.a.b, space.c, space.d) == (1, [2], 3)
    with pytest.raises(TypeError, match=r"\[4\]"):
        NestedNamespace({4: 1})  # pyright: ignore


def test_an_enumeration_grows_and_shrinks():
    circle = Shape.register("circle")
    square = Shape.register("SQUARE")
    assert Shape.CIRCLE is circle is Shape["Circle"] is Shape.from_name("circle")
    assert list(Shape) == [circle, square]
    assert (circle.value, square.value, len(Shape)) == (0, 1, 2)
    assert Shape.remove("circle") is circle
    assert circle not in Shape
    assert "circle" not in Shape
    assert "square" in Shape
    assert Shape.register("triangle").value == 2  # a value is not given out twice
    assert Shape.from_name("circle") is None
    with pytest.raises(KeyError, match="known: SQUARE, TRIANGLE"):
        Shape["circle"]
    with pytest.raises(ValueError, match=r"Shape\.SQUARE is already registered"):
        Shape.register("square")


def test_enumerations_do_not_share_members():
    assert "red" not in Shape
    assert "red" in Color


def test_a_pickled_member_is_the_same_object():
    assert pickle.loads(pickle.dumps(RED)) is RED


def test_a_member_unknown_to_the_receiver_is_registered_there():
    member = Color.register("green")
    sent = pickle.dumps(member)
    Color.remove("green")
    received = pickle.loads(sent)
    assert received is Color["green"]
    assert received is not member


def test_an_environment_variable_is_put_back():
    with temp_env_var("VERL_TEST_VARIABLE", "1"):
        with temp_env_var("VERL_TEST_VARIABLE", "2"):
            assert os.environ["VERL_TEST_VARIABLE"] == "2"
        assert os.environ["VERL_TEST_VARIABLE"] == "1"
    assert "VERL_TEST_VARIABLE" not in os.environ


def test_an_environment_variable_is_put_back_after_an_error():
    with pytest.raises(KeyError), temp_env_var("VERL_TEST_VARIABLE", "1"):
        raise KeyError
    assert "VERL_TEST_VARIABLE" not in os.environ


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain é 漢字 🙂", "plain é 漢字 🙂"),
        ("\x1b[2J\x1b[31mred", r"\x1b[2J\x1b[31mred"),
        ("line\nstep:9 - reward:1", r"line\nstep:9 - reward:1"),
        ("carriage\rreturn\ttab", r"carriage\rreturn\ttab"),
        ("\x9b31m", r"\x9b31m"),  # the one-byte form of ESC [
        ("a\u202eb\u2028c", r"a\u202eb\u2028c"),
        ("\ud800", r"\ud800"),
        (12.5, "12.5"),
    ],
)
def test_control_characters_are_shown_and_everything_else_stays(text, shown):
    assert printable(text) == shown


def test_long_text_is_cut_and_says_how_much_is_missing():
    assert printable("a" * 12, max_characters=10) == "a" * 10 + "... (2 more)"
    assert printable("a" * 10, max_characters=10) == "a" * 10


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
    assert 0.3 <= seconds_until_timeout(sleep, 60) < 30


def test_the_limit_holds_in_any_thread():
    elapsed = []
    thread = threading.Thread(target=lambda: elapsed.append(seconds_until_timeout(sleep, 60)))
    thread.start()
    thread.join(timeout=60)
    assert elapsed[0] < 30


def test_a_call_that_never_lets_go_of_the_interpreter_is_cut_off():
    @timeout_limit(0.3)
    def backtrack() -> object:
        return re.match(r"(a+)+$", "a" * 64 + "b")

    assert seconds_until_timeout(backtrack) < 30


def test_processes_it_started_die_with_it(tmp_path):
    note = tmp_path / "pid"

    @timeout_limit(2 * pace())
    def start_and_wait() -> None:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        note.write_text(str(child.pid))
        child.wait(60)

    seconds_until_timeout(start_and_wait)
    pid = int(note.read_text())
    wait_until(lambda: not is_running(pid), "the grandchild outlived the limit")


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

    assert seconds_until_timeout(slow) < 30
    assert seen == ["ran here"]
    assert signal.getsignal(signal.SIGALRM) is before
    left = signal.getitimer(signal.ITIMER_REAL)[0]
    assert 0.1 < timer - left < 60 if timer else left == 0


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
    thread.join(timeout=60)
    assert "only in the main thread" in errors[0]


def test_a_limit_must_be_positive():
    with pytest.raises(ValueError, match="got 0"):
        timeout_limit(0)

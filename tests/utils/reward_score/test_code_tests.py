"""Reading test cases, and the program out of a response."""

import json

import numpy as np
import pytest

from verl.utils.reward_score.code_tests import (
    Case,
    extract_code,
    is_right,
    read_cases,
    same_text,
    same_value,
)


def test_text_cases_keep_their_texts():
    cases = read_cases(json.dumps({"inputs": ["1\n", ["a", "b"]], "outputs": ["2", ["c", "d"]]}))
    assert [(case.stdin, case.expected) for case in cases] == [("1\n", "2"), ("a\nb", "c\nd")]


def test_function_cases_become_one_argument_per_line():
    cases = read_cases(
        {"inputs": ["[1]\n2", [[1], "x"]], "outputs": ["[3]", "x y"], "fn_name": "f"}
    )
    assert [case.stdin for case in cases] == ["[1]\n2", '[1]\n"x"']
    assert [case.expected for case in cases] == [[3], "x y"]


def test_arrays_of_a_parquet_reader_are_lists():
    arguments = np.empty(1, dtype=object)
    arguments[0] = np.array([1, 2])
    inputs = np.empty(1, dtype=object)
    inputs[0] = arguments
    case = read_cases({"inputs": inputs, "outputs": np.array(["3"], dtype=object), "fn_name": "f"})
    assert case[0].stdin == "[1, 2]"


def test_assertions_stand_alone():
    cases = read_cases({"assert_case": ["assert f(1) == 2"], "inputs": [], "outputs": []})
    assert [case.assertion for case in cases] == ["assert f(1) == 2"]


@pytest.mark.parametrize(
    ("test_cases", "message"),
    [
        ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
        ({"inputs": [], "outputs": []}, "0 inputs and 0 outputs"),
        ("[1]", "must be a mapping"),
        ("{", "Expecting property name"),
    ],
)
def test_what_is_no_set_of_cases_is_refused(test_cases, message):
    with pytest.raises(ValueError, match=message):
        read_cases(test_cases)


@pytest.mark.parametrize(
    ("completion", "code"),
    [
        ("```python\na\n```\ntext\n```python\nb\n```", "b"),
        ("```\na\n```\n```\nb\n```", "a"),
        ("```cpp\na\n```", "a"),
        ("```python\na\nb", "a\nb"),  # cut off
        ("```a```", "a"),
        ("no code", None),
    ],
)
def test_the_program_is_the_last_python_block_or_the_first_block(completion, code):
    assert extract_code(completion) == code


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        ("7", "7"),
        ("1 2\n3\n", "1 2 3"),
        ("  YES\r\n", "YES"),
        ("0.333333333", "0.33333333333"),
        ("100001.0", "100000.5"),
        ("5.0", "5"),
        ("5", "5.0"),
        ("1e3", "1000.0"),
        ("", "\n"),
        ("9" * 5000, "9" * 5000),
    ],
)
def test_texts_that_are_the_same(actual, expected):
    assert same_text(actual, expected)


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        ("7", "8"),
        ("12", "1 2"),
        ("yes", "YES"),
        ("100001", "100000"),  # whole numbers have no tolerance
        ("1000000000000000001", "1000000000000000000"),
        ("5.01", "5"),
        ("0.3334", "0.3333"),
        ("nan", "1.5"),
        ("NaN", "nan"),
        ("inf", "1e999"),
        ("1_0", "10"),
        ("", "0"),
        ("1 1", "1"),
        ("True", "1"),
    ],
)
def test_texts_that_differ(actual, expected):
    assert not same_text(actual, expected)


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        ([1, 2], [1, 2]),
        ([1, 2], [[1, 2]]),  # datasets may wrap the value
        (3, [3]),
        ([1, 2], (1, 2)),
        ({"1": [2.0]}, {1: [2.0]}),
        (0.30000000000000004, 0.3),
        (None, None),
        ("a", "a"),
    ],
)
def test_values_that_are_the_same(actual, expected):
    assert same_value(actual, expected)


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        ([1, 2], [2, 1]),
        ([1], [1, 1]),
        ([[1, 2]], [1, 2]),
        ("3", 3),
        ({"a": 1}, {"a": 1, "b": 2}),
        (0.31, 0.3),
        (None, 0),
        ([], None),
        (10**400, 0.5),
    ],
)
def test_values_that_differ(actual, expected):
    assert not same_value(actual, expected)


@pytest.mark.parametrize(
    "stdout", [b"", b"{", b"[" * 10**5, b"1 1", b"\xff", b"9" * 10**5, b'{"a":1}{"a":1}']
)
def test_what_is_not_one_json_document_is_wrong(stdout):
    assert not is_right(Case(0, "", 1, fn_name="f"), stdout)

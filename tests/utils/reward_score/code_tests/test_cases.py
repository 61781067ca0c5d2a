"""Reading test cases, and the program out of a response."""

import json

import numpy as np
import pytest

from verl.utils.reward_score.code_tests import extract_code, read_cases


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

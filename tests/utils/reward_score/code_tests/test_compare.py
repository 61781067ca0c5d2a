"""When an answer is right."""

import pytest

from verl.utils.reward_score.code_tests.cases import Case
from verl.utils.reward_score.code_tests.compare import is_right, same_text, same_value


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

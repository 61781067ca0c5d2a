"""Whether what a program gave back is what was expected.

Text is compared word by word, so spaces and line ends do not matter. A number written with a point
or an exponent may differ by one part in 100,000 from the expected one, if that is written so too;
whole numbers and words must agree. Values are compared as JSON: tuples are lists.
"""

import json
import math
from decimal import Decimal, InvalidOperation
from typing import Any

from verl.utils.reward_score.code_tests.cases import Case

RELATIVE_TOLERANCE = 1e-5
ABSOLUTE_TOLERANCE = 1e-8
_MAX_DIGITS = 400  # of a number that is not written exactly as expected


def is_right(case: Case, stdout: bytes) -> bool:
    text = stdout.decode("utf-8", errors="replace")
    if case.fn_name is None:
        return same_text(text, case.expected)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return same_value(value, case.expected)


def same_text(actual: str, expected: str) -> bool:
    words, expected_words = actual.split(), expected.split()
    return len(words) == len(expected_words) and all(map(_same_word, words, expected_words))


def same_value(actual: Any, expected: Any) -> bool:
    """Datasets write the value, or a list that holds only it."""
    is_wrapped = isinstance(expected, list) and len(expected) == 1
    return _equal(actual, expected) or (is_wrapped and _equal(actual, expected[0]))


def _same_word(actual: str, expected: str) -> bool:
    if actual == expected:
        return True
    number, expected_number = _number(actual), _number(expected)
    if number is None or expected_number is None:
        return False
    if _is_decimal(actual) and _is_decimal(expected):
        return _close(float(number), float(expected_number))
    return number == expected_number


def _number(word: str) -> Decimal | None:
    if len(word) > _MAX_DIGITS or not word.isascii() or "_" in word:
        return None
    try:
        number = Decimal(word)
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


def _is_decimal(word: str) -> bool:
    return not word.lstrip("+-").isdigit()


def _equal(actual: Any, expected: Any) -> bool:
    """`actual` comes from JSON: it has no equality of its own."""
    if isinstance(expected, list | tuple):
        same_length = isinstance(actual, list) and len(actual) == len(expected)
        return same_length and all(map(_equal, actual, expected))
    if isinstance(expected, dict):
        named = {str(key): value for key, value in expected.items()}
        same_keys = isinstance(actual, dict) and actual.keys() == named.keys()
        return same_keys and all(_equal(actual[key], value) for key, value in named.items())
    if isinstance(expected, float) and isinstance(actual, float):
        return _close(actual, expected)
    return actual == expected


def _close(actual: float, expected: float) -> bool:
    return math.isclose(actual, expected, rel_tol=RELATIVE_TOLERANCE, abs_tol=ABSOLUTE_TOLERANCE)

"""Test cases for model-written programs: what to run, with which input, and when it is right.

Nothing here runs code. `prime_code` runs the cases in the local sandbox, `sandbox_fusion` sends
them to a service. Both keep to one rule: the program under test gets the input and never the
expected output; whether its answer is right is decided here, in our process, on plain data.

Cases have the format of APPS (arXiv:2105.09938), parallel lists of inputs and outputs:

    {"inputs": [...], "outputs": [...]}                     text in, text out
    {"inputs": [...], "outputs": [...], "fn_name": "f"}     arguments in, value out
    {"assert_case": ["assert f(2) == 4", ...]}              statements about the program

The arguments of a function are one JSON document per line, or a list; its value is a JSON document
or the value itself. Text is compared word by word, so spaces and line ends do not matter; decimals
may differ by one part in 100,000, whole numbers and words must agree. Values are compared as JSON.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

import numpy as np

Verdict = bool | int
"""True or False: the answer was right or wrong. Otherwise one of the numbers below."""

SERVICE_ERROR = -1
RUNTIME_ERROR = -2
TIMEOUT = -3
COMPILE_ERROR = -4
CONTINUOUS_CASES = 10
"""A continuous score looks at this many cases."""


def score_of(verdicts: Iterable[Verdict], *, continuous: bool) -> float:
    """The fraction of cases passed, or 1 only if all are. Reads no further than it must."""
    if continuous:
        passed = [verdict is True for verdict in verdicts]
        return sum(passed) / len(passed)
    return float(all(verdict is True for verdict in verdicts))


@dataclass(frozen=True)
class Case:
    """One test. Only `stdin` is ever shown to the program that is tested."""

    index: int
    stdin: str
    expected: Any
    """Text, or for a function the value; nothing for an assertion."""
    fn_name: str | None = None
    assertion: str | None = None


def read_cases(test_cases: str | Mapping[str, Any]) -> list[Case]:
    """Raises `ValueError` for what is no set of test cases: that is the dataset's fault, not the
    program's, so it is not a score."""
    table = _as_table(test_cases)
    assertions = _as_list(table, "assert_case")
    if assertions:
        return [Case(i, "", None, assertion=str(text)) for i, text in enumerate(assertions)]
    inputs, outputs = _as_list(table, "inputs"), _as_list(table, "outputs")
    if len(inputs) != len(outputs) or not inputs:
        raise ValueError(
            f"test cases have {len(inputs)} inputs and {len(outputs)} outputs; there must be one "
            "output for each input, and at least one"
        )
    name = table.get("fn_name")
    pairs = enumerate(zip(inputs, outputs, strict=True))
    if name:
        return [Case(i, _arguments(x), _value(y), fn_name=str(name)) for i, (x, y) in pairs]
    return [Case(i, _text(x), _text(y)) for i, (x, y) in pairs]


def _as_table(test_cases: str | Mapping[str, Any]) -> Mapping[str, Any]:
    table = json.loads(test_cases) if isinstance(test_cases, str | bytes) else test_cases
    if not isinstance(table, Mapping):
        raise ValueError(
            f"test cases are {type(table).__name__}; they must be a mapping with inputs and "
            "outputs, or its JSON text"
        )
    return table


def _as_list(table: Mapping[str, Any], key: str) -> list[Any]:
    entries = table.get(key)
    if isinstance(entries, str):
        return [entries]
    return [] if entries is None else [_plain(entry) for entry in entries]


def _plain(value: Any) -> Any:
    """Lists for the arrays that Parquet readers make of them."""
    if isinstance(value, np.ndarray):
        return [_plain(entry) for entry in value]
    return value.item() if isinstance(value, np.generic) else value


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _arguments(value: Any) -> str:
    return "\n".join(map(json.dumps, value)) if isinstance(value, list) else str(value)


def _value(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value  # a text that is not JSON stands for itself


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


_FENCE = "```"


def extract_code(completion: str) -> str | None:
    """None where there is no block. A block that was cut off goes to the end of the text."""
    _, marker, rest = completion.rpartition(_FENCE + "python")
    if not marker:
        _, marker, rest = completion.partition(_FENCE)
        if not marker:
            return None
        language, newline, body = rest.partition("\n")
        rest = body if newline and _FENCE not in language else rest
    return rest.partition(_FENCE)[0].strip("\n")

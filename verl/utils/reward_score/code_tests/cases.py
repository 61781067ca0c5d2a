"""Test cases in the format of APPS (arXiv:2105.09938): parallel lists of inputs and outputs.

    {"inputs": [...], "outputs": [...]}                     text in, text out
    {"inputs": [...], "outputs": [...], "fn_name": "f"}     arguments in, value out
    {"assert_case": ["assert f(2) == 4", ...]}              statements about the program

The arguments of a function are one JSON document per line, or a list; its value is a JSON document
or the value itself.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


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

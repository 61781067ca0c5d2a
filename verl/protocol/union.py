"""How batches that meet agree: equal values merge, and a conflict is an error that names it."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from verl.utils.tensor_rows import BatchError, deep_equal


def union_numpy_dict(
    tensor_dict1: dict[str, np.ndarray], tensor_dict2: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Add the arrays of the second to the first and return it; arrays in both must be equal.

    Equal means deep equality: NaN is NaN, and object arrays are compared by what is in them.
    """
    for key, array in tensor_dict2.items():
        if not isinstance(array, np.ndarray):
            raise BatchError(f"array {key!r} must be an np.ndarray, got {type(array).__name__}")
        if key in tensor_dict1 and not deep_equal(tensor_dict1[key], array):
            raise BatchError(f"cannot unite batches: array {key!r} is in both and not equal")
    for key, array in tensor_dict2.items():
        tensor_dict1.setdefault(key, array)
    return tensor_dict1


def union_meta_info(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """One new dictionary of both; values in both must be equal."""
    for key, value in second.items():
        if key in first and not deep_equal(first[key], value):
            raise BatchError(
                f"cannot unite batches: meta_info {key!r} is {first[key]!r} and {value!r}"
            )
    return {**second, **first}


def concat_meta_info(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The meta_info of parts that become one batch.

    `metrics` (a dictionary per part, or a list of them) are collected into one dictionary of lists;
    any other key must have the same value wherever it occurs.
    """
    merged: dict[str, Any] = {}
    metrics: list[Mapping[str, Any]] = []
    for meta_info in parts:
        for key, value in meta_info.items():
            if key == "metrics":
                metrics += [] if value is None else value if isinstance(value, list) else [value]
            elif not deep_equal(merged.setdefault(key, value), value):
                raise BatchError(
                    f"Conflicting values for meta_info key {key!r}: {merged[key]!r} and {value!r}"
                )
    if metrics:
        merged["metrics"] = list_of_dict_to_dict_of_list(metrics)
    return merged


def list_of_dict_to_dict_of_list(list_of_dict: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """[{a: 1}, {a: 2}] -> {a: [1, 2]}; every dictionary must have the keys of the first."""
    if not list_of_dict:
        return {}
    keys = list_of_dict[0].keys()
    for number, entry in enumerate(list_of_dict):
        if entry.keys() != keys:
            raise BatchError(
                f"all dictionaries must have the same keys: number 0 has {sorted(keys)}, "
                f"number {number} has {sorted(entry.keys())}"
            )
    return {key: [entry[key] for entry in list_of_dict] for key in keys}

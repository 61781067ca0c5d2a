"""Whether two nested Python values are the same, for batches that meet.

Plain `==` fails on them in three ways: it is ambiguous for arrays and tensors, NaN is not NaN, and
it does not return from a value that contains itself.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from verl.utils.jagged import same_tensor


def deep_equal(left: Any, right: Any) -> bool:
    """Compare containers, arrays and tensors by content, anything else by `==`; NaN equals NaN.

    Two values with cycles are equal when no walk through both ever finds a difference.
    """
    pending = [(left, right)]
    compared: set[tuple[int, int]] = set()
    while pending:
        one, other = pending.pop()
        if one is other or (id(one), id(other)) in compared:
            continue
        if not _is_container(one):
            if _is_container(other) or not _same_leaf(one, other):
                return False
            continue
        compared.add((id(one), id(other)))
        pairs = _pair_up(one, other)
        if pairs is None:
            return False
        pending.extend(pairs)
    return True


def _is_container(value: Any) -> bool:
    return isinstance(value, Mapping | list | tuple) or _is_object_array(value)


def _is_object_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == object


def _pair_up(one: Any, other: Any) -> Iterable[tuple[Any, Any]] | None:
    """The elements to compare in turn, or None when the containers already differ."""
    if isinstance(one, Mapping):
        if not isinstance(other, Mapping) or one.keys() != other.keys():
            return None
        return [(value, other[key]) for key, value in one.items()]
    if isinstance(one, np.ndarray):
        if not isinstance(other, np.ndarray) or one.shape != other.shape:
            return None
        return zip(one.ravel().tolist(), other.ravel().tolist(), strict=True)
    kind = tuple if isinstance(one, tuple) else list
    if not isinstance(other, kind) or len(one) != len(other):
        return None
    return zip(one, other, strict=True)


def _same_leaf(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and same_tensor(one, other)
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return _same_array(one, other)
    return bool(one == other) or (_is_nan(one) and _is_nan(other))


def _same_array(one: Any, other: Any) -> bool:
    if not isinstance(one, np.ndarray) or not isinstance(other, np.ndarray):
        return False
    can_hold_nan = one.dtype.kind in "fc" and other.dtype.kind in "fc"
    return np.array_equal(one, other, equal_nan=can_hold_nan)


def _is_nan(value: Any) -> bool:
    """NaN is the one number that differs from itself."""
    return isinstance(value, float | complex | np.floating | np.complexfloating) and value != value

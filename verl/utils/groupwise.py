"""Statistics of rows that share a label, without a Python loop over rows or groups.

Labels become consecutive numbers once (`as_torch_index`); sums over a group are then one
`index_add`. Deviations are taken from a member of the group and accumulated in float64, so a group
of equal values has exactly their mean and exactly zero spread: no rounding noise to divide by.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

NOT_ONE_ARROW_TYPE = (
    pa.ArrowInvalid,
    pa.ArrowTypeError,
    pa.ArrowNotImplementedError,
    UnicodeEncodeError,
    OverflowError,
)
SORTED_TYPES = {pa.large_string(), pa.string(), pa.bool_(), pa.int64(), pa.int32()}


def as_torch_index(
    index: np.ndarray | Tensor | Sequence[Any], device: torch.device | str | None = None
) -> Tensor:
    """Number the labels: (B,) int64 in [0, G), equal exactly where the labels are equal.

    Integers and strings are numbered in sorted order, so the numbers do not depend on the order of
    the rows; labels of other or mixed types in order of first appearance. Floats within 1e-6 of an
    integer are rounded to it. A missing label (None, NaN) is a ValueError: rows without a label are
    not a group.
    """
    if isinstance(index, Tensor):
        device = index.device if device is None else device
        index = index.cpu().numpy()
    labels = index if isinstance(index, np.ndarray) else _object_array(index)
    if labels.ndim != 1:
        raise ValueError(f"group labels have shape {labels.shape}; one label per row is needed")
    return torch.from_numpy(_codes(_rounded(labels))).to(device)


def group_mean_std(
    scores: Tensor, gidx: Tensor, eps: float = 1e-6, device: torch.device | str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, sample standard deviation (n - 1) and size of each group, each of shape (G,).

    `scores` is (B,), `gidx` (B,) as from `as_torch_index`. A single row has nothing to be compared
    with: mean 0, std 1. `eps` is the least std returned, so that dividing by it is safe.
    """
    scores, gidx = scores.to(device), gidx.to(device)
    if scores.ndim != 1 or scores.shape != gidx.shape:
        raise ValueError(
            f"scores have shape {tuple(scores.shape)} and group indices {tuple(gidx.shape)}; "
            "both must be (B,)"
        )
    mean, squares, count = _moments(scores.double(), gidx)
    std = (squares / (count - 1).clamp(min=1)).sqrt().clamp(min=eps)
    is_single = count <= 1
    mean, std = mean.masked_fill(is_single, 0.0), std.masked_fill(is_single, 1.0)
    dtype = scores.dtype if scores.is_floating_point() else torch.get_default_dtype()
    return mean.to(dtype), std.to(dtype), count.to(dtype)


def group_weighted_mean(values: Tensor, weights: Tensor, gidx: Tensor) -> Tensor:
    """sum(w v) / sum(w) over the rows of each group; (G,) or (G, T), as `values` is (B,) or (B, T).

    Weights are not negative. Where all values with a positive weight are equal the mean is exactly
    that value; where a group has no weight at all it is 0.
    """
    wide, weights = values.double(), weights.double()
    has_weight = weights > 0
    anchor = group_max(wide.masked_fill(~has_weight, torch.finfo(wide.dtype).min), gidx)
    deviation = torch.where(has_weight, wide - anchor[gidx], 0.0)
    total = group_sum(weights, gidx)
    mean = anchor + group_sum(weights * deviation, gidx) / (total + (total == 0))
    return torch.where(total > 0, mean, 0.0).to(values.dtype)


def group_sum(values: Tensor, gidx: Tensor) -> Tensor:
    """Sum over the rows of each group: (B, ...) to (G, ...)."""
    return _empty_groups(values, gidx).index_add_(0, gidx, values)


def group_max(values: Tensor, gidx: Tensor) -> Tensor:
    """Maximum over the rows of each group: (B, ...) to (G, ...)."""
    rows = gidx.reshape(-1, *[1] * (values.ndim - 1)).expand_as(values)
    return _empty_groups(values, gidx).scatter_reduce_(0, rows, values, "amax", include_self=False)


def group_top_two(values: Tensor, gidx: Tensor) -> tuple[Tensor, Tensor]:
    """The rows (B indices) of each group's largest and second largest value, each of shape (G,).

    Among equal values the earlier row counts as larger. Every group must have two rows or more.
    """
    by_value = torch.argsort(values, descending=True, stable=True)
    order = by_value[torch.argsort(gidx[by_value], stable=True)]  # group by group, largest first
    count = torch.bincount(gidx)
    start = count.cumsum(0) - count
    return order[start], order[start + 1]


def _moments(values: Tensor, gidx: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, sum of squared deviations and size of each group."""
    count = torch.bincount(gidx)
    anchor = group_max(values, gidx)
    deviation = values - anchor[gidx]
    mean_deviation = group_sum(deviation, gidx) / count.clamp(min=1)
    squares = group_sum((deviation - mean_deviation[gidx]).square(), gidx)
    return anchor + mean_deviation, squares, count


def _empty_groups(values: Tensor, gidx: Tensor) -> Tensor:
    num_groups = int(gidx.max()) + 1 if len(gidx) else 0
    return values.new_zeros(num_groups, *values.shape[1:])


def _object_array(labels: Sequence[Any]) -> np.ndarray:
    """One object per label: `np.asarray([1, "1"])` would make both the string "1"."""
    return np.fromiter(labels, dtype=object, count=len(labels))


def _rounded(labels: np.ndarray) -> np.ndarray:
    """Float labels that went through arithmetic and are integers but for its rounding."""
    if labels.dtype.kind == "O":
        if not len(labels) or not all(isinstance(label, float) for label in labels):
            return labels
        labels = labels.astype(np.float64)
    if labels.dtype.kind != "f" or not len(labels):
        return labels
    nearest = np.rint(labels)
    return nearest.astype(np.int64) if (np.abs(labels - nearest) <= 1e-6).all() else labels


def _codes(labels: np.ndarray) -> np.ndarray:
    try:
        array = pa.array(labels, type=pa.large_string() if labels.dtype.kind == "U" else None)
    except NOT_ONE_ARROW_TYPE:
        return _codes_by_hash(labels)
    if array.null_count or array.type not in SORTED_TYPES:
        return _codes_by_hash(labels)  # slower, and it says which row has no label
    encoded = array.dictionary_encode()
    order = pc.call_function("array_sort_indices", [encoded.dictionary]).to_numpy()
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    return rank[encoded.indices.to_numpy(zero_copy_only=False)]


def _codes_by_hash(labels: np.ndarray) -> np.ndarray:
    numbers: dict[Any, int] = {}
    codes = np.empty(len(labels), dtype=np.int64)
    for row, label in enumerate(labels.tolist()):
        if label is None or label != label:  # NaN is the one label that differs from itself
            raise ValueError(
                f"row {row} has no group label (it is {label}); every row needs its uid"
            )
        codes[row] = numbers.setdefault(label, len(numbers))
    return codes

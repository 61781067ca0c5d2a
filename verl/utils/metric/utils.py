"""How the parts of a metric become one number.

A metric is measured in parts: one value per micro-batch, per rank, per update. A `Metric` keeps
the parts and says how they combine, and a mean keeps a weight with each part (tokens or sequences,
whichever the mean is over), so that the result does not depend on how the batch was split.

A plain list carries no such rule, so `reduce_metrics` reads it from the name.
"""

import math
import re
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch

# The last of these words in a name says what the number is; `..._max_deviation` is a maximum and
# `..._seq_max_k2_mean` is a mean. Only whole words count: `response/terminated` holds no "min".
_WORD = re.compile(r"[a-z0-9]+")
_MEANING = {"max": "max", "min": "min"} | dict.fromkeys(("mean", "std", "var", "fraction"), "mean")


class AggregationType(str, Enum):
    """How parts combine. `MEAN` is weighted, the others ignore the weights."""

    MEAN = "mean"
    SUM = "sum"
    MIN = "min"
    MAX = "max"


class Metric:
    """The parts of one metric and the rule that joins them.

        mean = sum_i(weight_i * value_i) / sum_i(weight_i)

    Sums are exact (`math.fsum`), so neither the order nor the grouping of the parts shows in the
    result. Without parts, or with no weight at all, the value is NaN: nothing was measured.
    """

    def __init__(self, aggregation: str | AggregationType, value: Any = None) -> None:
        self.aggregation = _aggregation_type(aggregation)
        self.values: list[float] = []
        self.weights: list[float] = []
        if value is not None:
            self.extend(value if isinstance(value, (list, tuple)) else [value])

    def append(self, value: Any, weight: float = 1.0) -> None:
        """Add one part. Another `Metric` adds all its parts and must have the same rule."""
        if isinstance(value, Metric):
            if value.aggregation is not self.aggregation:
                raise ValueError(
                    f"a {value.aggregation.value} metric cannot be added to a "
                    f"{self.aggregation.value} metric"
                )
            self.values += value.values
            self.weights += value.weights
            return
        self.values.append(float(value))
        self.weights.append(float(weight))

    def extend(self, values: "Iterable[Any] | Metric") -> None:
        """Add several parts, or all of another `Metric` with the same rule."""
        for value in [values] if isinstance(values, Metric) else values:
            self.append(value)

    def init_list(self) -> "Metric":
        """A new one with the same rule and no parts."""
        return Metric(self.aggregation)

    def aggregate(self) -> float:
        if not self.values:
            return math.nan
        if self.aggregation is AggregationType.MAX:
            return _extreme(max, self.values)
        if self.aggregation is AggregationType.MIN:
            return _extreme(min, self.values)
        if self.aggregation is AggregationType.SUM:
            return _exact_sum(self.values)
        weight = _exact_sum(self.weights)
        # A part without weight holds no samples; its value, NaN perhaps, means nothing.
        pairs = zip(self.values, self.weights, strict=True)
        total = _exact_sum([value * part for value, part in pairs if part != 0])
        return total / weight if weight else math.nan

    @classmethod
    def from_dict(
        cls, values: Mapping[str, Any], aggregation: str | AggregationType
    ) -> "dict[str, Metric]":
        """One metric per entry, all with the same rule."""
        return {name: cls(aggregation, value) for name, value in values.items()}

    @classmethod
    def merge(cls, parts: "Iterable[Metric]") -> "Metric":
        """One metric that holds the parts of all; ranks and micro-batches are joined this way."""
        parts = list(parts)
        if not parts:
            raise ValueError("there is nothing to merge: pass at least one Metric")
        merged = cls(parts[0].aggregation)
        merged.extend(parts)
        return merged

    @classmethod
    def chain(cls, metrics: "Iterable[Metric]") -> "Metric":
        """`merge`, under the name that code written for this interface calls."""
        return cls.merge(metrics)

    def __repr__(self) -> str:
        return f"Metric({self.aggregation.value}, {self.values})"


def reduce_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """One number per name, in a new dictionary.

    A `Metric` (or a list of them) follows its own rule. A list of numbers, nested lists included,
    becomes its maximum, minimum or mean as the name says: the last whole word among max, min,
    mean, std, var and fraction decides, and a name without any is a mean over the list's entries,
    each counted once. Text passes through.
    """
    return {name: _reduce(name, value) for name, value in metrics.items()}


def aggregation_of(name: str) -> AggregationType:
    """What a plain list under this name is reduced by."""
    words = [_MEANING[word] for word in _WORD.findall(name.lower()) if word in _MEANING]
    return AggregationType(words[-1] if words else "mean")


def _reduce(name: str, value: Any) -> Any:
    if isinstance(value, str):
        return value
    entries = list(_flatten(value))
    strange = [entry for entry in entries if entry is None or isinstance(entry, (str, Mapping))]
    if strange:
        raise ValueError(f"metric {name!r} holds {strange[0]!r}; its entries must be numbers")
    metrics = [entry for entry in entries if isinstance(entry, Metric)]
    if metrics and len(metrics) < len(entries):
        raise ValueError(f"metric {name!r} mixes Metric objects and plain numbers: {entries}")
    if metrics:
        return Metric.merge(metrics).aggregate()
    return Metric(aggregation_of(name), entries).aggregate()


def _flatten(value: Any) -> Iterable[Any]:
    if isinstance(value, (np.ndarray, torch.Tensor)):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        for entry in value:
            yield from _flatten(entry)
    else:
        yield value


def _aggregation_type(aggregation: str | AggregationType) -> AggregationType:
    known = [kind.value for kind in AggregationType]
    if aggregation not in known:
        raise ValueError(f"unknown aggregation {aggregation!r}; it is one of: {', '.join(known)}")
    return AggregationType(aggregation)


def _exact_sum(values: list[float]) -> float:
    # fsum refuses inf - inf, where the honest answer is NaN.
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)


def _extreme(choose: Any, values: list[float]) -> float:
    # max() and min() ignore a NaN or return it depending on its place.
    return math.nan if any(map(math.isnan, values)) else choose(values)

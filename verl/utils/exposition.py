"""Metrics in the text format that Prometheus reads (version 0.0.4).

A family is a name with a type and a sentence; each of its samples has labels and a number.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
"""Upper bounds of a histogram of seconds."""


@dataclass(kw_only=True)
class Family:
    """`samples` are (suffix of the name, labels, value)."""

    name: str
    kind: str
    """`gauge`, `counter` (its name ends in `_total`) or `histogram`."""

    meaning: str
    samples: list[tuple[str, Mapping[str, str], float]] = field(default_factory=list)

    def add(self, value: float, suffix: str = "", **labels: str) -> None:
        self.samples.append((suffix, labels, value))


class Seconds:
    """A histogram of durations."""

    def __init__(self) -> None:
        self.counts = [0] * len(BUCKETS)
        self.sum, self.num = 0.0, 0

    def add(self, seconds: float) -> None:
        self.sum += seconds
        self.num += 1
        for place, bound in enumerate(BUCKETS):
            self.counts[place] += seconds <= bound

    def put(self, family: Family, **labels: str) -> None:
        for bound, count in zip(BUCKETS, self.counts, strict=True):
            family.add(count, "_bucket", **labels, le=str(bound))
        family.add(self.num, "_bucket", **labels, le="+Inf")
        family.add(self.sum, "_sum", **labels)
        family.add(self.num, "_count", **labels)


def metric_name(name: str, prefix: str = "verl") -> str:
    """`critic/score/mean` is `verl_critic_score_mean` there."""
    return f"{prefix}_{re.sub(r'[^a-zA-Z0-9_]+', '_', name).strip('_')}"


def exposition(families: Iterable[Family]) -> str:
    lines: list[str] = []
    for family in families:
        meaning = family.meaning.replace("\\", r"\\").replace("\n", r"\n")
        lines.append(f"# HELP {family.name} {meaning}")
        lines.append(f"# TYPE {family.name} {family.kind}")
        for suffix, labels, value in family.samples:
            lines.append(f"{family.name}{suffix}{shown_labels(labels)} {shown_value(value)}")
    return "".join(f"{line}\n" for line in lines)


def shown_value(value: float) -> str:
    number = float(value)
    if math.isinf(number):
        return "+Inf" if number > 0 else "-Inf"
    return "NaN" if math.isnan(number) else repr(number)


def shown_labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{escaped(value)}"' for name, value in labels.items()) + "}"


def escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

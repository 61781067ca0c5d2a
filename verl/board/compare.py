"""Where two runs part: the first step, token or metric that differs (`python -m verl.diff A B`).

Steps are compared in order: first the samples (prompt, then each response token, then each number
of a token), then the metrics that are not about time or memory.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from verl.board.reader import StoreReader

MACHINE_METRICS = ("timing", "perf/", "global_seqlen", "agent_loop/", "training/memory")
"""Metrics that differ between equal runs."""


@dataclass(frozen=True)
class Difference:
    """The first place where two runs differ."""

    step: int
    what: str
    ours: Any
    theirs: Any
    sample: tuple[int, int] | None = None
    """The ids of the two samples in their stores, if it is about one."""

    token: int | None = None

    def __str__(self) -> str:
        return f"step {self.step}: {self.what}: {self.ours!r} against {self.theirs!r}"


def first_difference(ours: StoreReader, theirs: StoreReader) -> Difference | None:
    """None if every step that both have is equal."""
    steps = {entry["step"]: entry for entry in theirs.steps()}
    for entry in ours.steps():
        number = entry["step"]
        if number not in steps:
            continue
        found = sample_difference(ours, theirs, number)
        found = found or metric_difference(number, entry["metrics"], steps[number]["metrics"])
        if found is not None:
            return found
    return None


def sample_difference(ours: StoreReader, theirs: StoreReader, step: int) -> Difference | None:
    for row, (a, b) in enumerate(zip_longest(ours.trained(step), theirs.trained(step))):
        if row == 0 and (a is None or b is None):
            return None  # left out or removed (retention); what is left to compare are metrics
        if a is None or b is None:
            there, gone = (
                ("the second run", "the first") if a is None else ("the first run", "the second")
            )
            return Difference(step, f"sample {row} is in {there} only", there, gone)
        both = (a["id"], b["id"])
        if a["uid"] != b["uid"] or a["prompt_tokens"] != b["prompt_tokens"]:
            return Difference(step, f"prompt of sample {row}", a["prompt"], b["prompt"], both)
        for at, (one, other) in enumerate(zip_longest(a["tokens"], b["tokens"])):
            if one != other:
                what = f"token {at} of sample {row} ({a['uid']})"
                return Difference(step, what, one, other, both, at)
        for name in sorted({*a["columns"], *b["columns"]}):
            found = column_difference(a["columns"].get(name), b["columns"].get(name))
            if found is not None:
                at, x, y = found
                what = f"{name} of token {at} of sample {row} ({a['uid']})"
                return Difference(step, what, x, y, both, at)
        if a["score"] != b["score"]:
            return Difference(step, f"score of sample {row}", a["score"], b["score"], both)
    return None


def column_difference(
    ours: list[float] | None, theirs: list[float] | None
) -> tuple[int, float | None, float | None] | None:
    for at, (x, y) in enumerate(zip_longest(ours or (), theirs or ())):
        if x != y and not (x != x and y != y):  # both are NaN
            return at, x, y
    return None


def metric_difference(
    step: int, ours: Mapping[str, Any], theirs: Mapping[str, Any]
) -> Difference | None:
    for name in sorted({*ours, *theirs}):
        if not name.startswith(MACHINE_METRICS) and ours.get(name) != theirs.get(name):
            return Difference(step, name, ours.get(name), theirs.get(name))
    return None

"""What a person reads about an evaluation, and the same for programs."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from verl.trainer.evaluation.responses import Unscored
from verl.trainer.evaluation.run import Evaluation
from verl.trainer.evaluation.summary import CONFIDENCE, Estimate, SourceSummary
from verl.utils.py_functional import printable

MAX_LISTED = 20
METHOD = "intervals: Wilson's where every prompt has 0 or 1, else 1.96 standard errors over prompts"


def print_table(evaluation: Evaluation, console: Console) -> None:
    """One line per data source and number."""
    table = Table(box=None, pad_edge=False)
    table.add_column("data source", overflow="fold")
    table.add_column("metric")
    for heading in ("value", f"{CONFIDENCE:.0%} interval", "prompts", "scored", "unscored"):
        table.add_column(heading, justify="right")
    for source, summary in evaluation.sources.items():
        name, counts = printable(source), (summary.num_scored, summary.num_unscored)
        for metric, value in metrics(summary):
            shown = [value_text(value), interval_text(value), str(value.num_prompts)]
            table.add_row(Text(name), metric, *shown, *map(str, counts))
        if summary.mean is None:
            table.add_row(Text(name), "mean", "none", "", "0", *map(str, counts))
    console.print(table)
    console.print(METHOD, highlight=False, soft_wrap=True)


def metrics(summary: SourceSummary) -> Iterator[tuple[str, Estimate]]:
    if summary.mean is not None:
        yield "mean", summary.mean
    for k, value in summary.pass_at.items():
        yield f"pass@{k}", value


def value_text(estimate: Estimate) -> str:
    return f"{estimate.value:.4f}"


def interval_text(estimate: Estimate) -> str:
    if estimate.low is None or estimate.high is None:
        return ""
    return f"{estimate.low:.4f} to {estimate.high:.4f}"


def unscored_lines(unscored: list[Unscored]) -> Iterator[str]:
    """The first ones by row, response and reason, and how many there are."""
    if not unscored:
        return
    yield f"{len(unscored)} without a score, in none of the numbers:"
    for one in unscored[:MAX_LISTED]:
        place = f"row {one.row}" + (f", response {one.number}" if one.number is not None else "")
        yield f"  {place}: {printable(one.reason, max_characters=300)}"
    if len(unscored) > MAX_LISTED:
        yield f"  and {len(unscored) - MAX_LISTED} more (data.output_path lists all)"


def test_scores(evaluation: Evaluation) -> dict[str, float]:
    """`test_score/<data source>`: its mean score."""
    return {
        f"test_score/{source}": summary.mean.value
        for source, summary in evaluation.sources.items()
        if summary.mean is not None
    }


def as_json(evaluation: Evaluation, path: str, pass_threshold: float) -> str:
    """Everything, for a program."""
    document: dict[str, Any] = {
        "path": path,
        "confidence": CONFIDENCE,
        "pass_threshold": pass_threshold,
        "test_scores": test_scores(evaluation),
        "sources": {source: asdict(summary) for source, summary in evaluation.sources.items()},
        "unscored": [asdict(one) for one in evaluation.unscored],
    }
    return json.dumps(document, indent=2) + "\n"

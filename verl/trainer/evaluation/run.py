"""From a configuration to an `Evaluation`: every response graded, summed up and reported.

The report is a table for a person and the same numbers as JSON for programs.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text
from tqdm import tqdm

from verl.config.faults import ConfigError, Fault
from verl.config.generation import EvaluationConfig
from verl.protocol.trajectory import Grade, Score
from verl.trainer.evaluation.grading import (
    LocalWorkers,
    RayWorkers,
    RewardFunction,
    Workers,
    grade_all,
)
from verl.trainer.evaluation.responses import ResponseFile, Task, Unscored
from verl.trainer.evaluation.summary import (
    CONFIDENCE,
    Estimate,
    PromptScores,
    SourceSummary,
    summarise,
)
from verl.trainer.ppo.reward import get_custom_reward_fn
from verl.trainer.ppo.reward_functions import name_of, takes_whole_batch
from verl.utils.py_functional import printable
from verl.utils.reward_score import default_compute_score
from verl.workers.reward_manager.prime import one_per_core


@dataclass(frozen=True)
class Evaluation:
    """The numbers of each data source, and every response that has no score."""

    sources: dict[str, SourceSummary]
    unscored: list[Unscored]


def evaluate(config: EvaluationConfig) -> Evaluation:
    """Grade the responses of `data.path`."""
    custom = custom_function(config)
    file = ResponseFile(config.data, needs_answer=custom is None)
    tally = Tally(config.grading.pass_threshold)
    with tqdm(total=file.num_rows, desc="rows", disable=None, leave=False) as bar:

        def tasks() -> Iterator[Task]:
            for item in file:
                bar.update(item.row - bar.n)
                if isinstance(item, Task):
                    yield item
                else:
                    tally.set_aside(item)

        workers = make_workers(custom if custom is not None else default_compute_score, config)
        try:
            grade_all(tasks(), workers, on_grade=tally.add)
        finally:
            workers.close()
    return tally.evaluation()


def custom_function(config: EvaluationConfig) -> RewardFunction | None:
    key = "custom_reward_function.path"
    try:
        function = get_custom_reward_fn(config)
    except (FileNotFoundError, AttributeError, RuntimeError, ValueError) as error:
        raise ConfigError([Fault(str(error), (key,))]) from error
    if function is not None and takes_whole_batch(function)[0]:
        text = (
            f"{key}: {name_of(function)} takes a whole batch; evaluation calls a function once per "
            "response, as (data_source, response, ground_truth)"
        )
        raise ConfigError([Fault(text, (key,))])
    return function


def make_workers(function: RewardFunction, config: EvaluationConfig) -> Workers:
    grading, ray_init = config.grading, dict(config.ray_kwargs.ray_init)
    if grading.controller == "ray":
        return RayWorkers(
            function,
            num_workers=grading.num_workers,
            timeout_seconds=grading.timeout_seconds,
            ray_init=ray_init,
        )
    asked = grading.num_workers or ray_init.get("num_cpus")
    return LocalWorkers(
        function,
        num_workers=one_per_core() if asked is None else int(asked),
        timeout_seconds=grading.timeout_seconds,
    )


class Tally:
    """Scores by data source and row; the texts are not kept."""

    def __init__(self, pass_threshold: float) -> None:
        self._pass_threshold = pass_threshold
        self._prompts: dict[str, dict[int, PromptScores]] = defaultdict(dict)
        self._unscored: list[Unscored] = []

    def add(self, task: Task, grade: Grade) -> None:
        if not isinstance(grade, Score):
            self.set_aside(Unscored(task.row, task.number, task.data_source, grade.reason))
            return
        prompt = self._prompts[task.data_source].setdefault(task.row, PromptScores())
        prompt.scores.append(grade.value)
        prompt.num_passed += accuracy(grade) >= self._pass_threshold

    def set_aside(self, unscored: Unscored) -> None:
        self._prompts[unscored.data_source].setdefault(unscored.row, PromptScores())
        self._unscored.append(unscored)

    def evaluation(self) -> Evaluation:
        num_unscored = Counter(unscored.data_source for unscored in self._unscored)
        return Evaluation(
            sources={
                source: summarise(prompts.values(), num_unscored[source])
                for source, prompts in sorted(self._prompts.items())
            },
            unscored=sorted(self._unscored, key=lambda one: (one.row, one.number or 0)),
        )


def accuracy(score: Score) -> float:
    """`acc` where the reward function reports it as a number, else the score."""
    reported = score.extras.get("acc")
    return float(reported if isinstance(reported, int | float | np.number) else score.value)


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

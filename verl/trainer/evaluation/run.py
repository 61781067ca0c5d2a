"""From a configuration to an `Evaluation`: every response graded, summed up and reported.

Each data source gets its mean score and pass@k with 95% confidence intervals. Prompts count equally
and are what was drawn at random, so every number is a mean over prompts: of the mean score of a
prompt's responses, or of its pass@k (arXiv:2107.03374). The interval is

    Wilson's score interval, where every prompt's value is 0 or 1: it does not shrink to nothing
    when all are right, and never leaves [0, 1];
    mean +- 1.96 standard errors otherwise, with the prompts' standard deviation, so that responses
    to one prompt are not taken for independent ones (arXiv:2411.00640).

A response without a score takes no part; it is counted and listed. The report is a table for a
person and the same numbers as JSON for programs.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import sqrt
from statistics import NormalDist, fmean, stdev
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
    RayCalls,
    ResponseFile,
    RewardFunction,
    Task,
    Unscored,
    grade_all,
)
from verl.trainer.ppo.reward import get_custom_reward_fn, name_of, takes_whole_batch
from verl.trainer.ppo.validation_metrics import pass_at_k, subset_sizes
from verl.utils.py_functional import printable
from verl.utils.reward_score import default_compute_score
from verl.workers.reward_manager.prime import PositionalCalls, one_per_core


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts; a single prompt's value has an interval only if it is 0 or 1."""

    value: float
    low: float | None
    high: float | None
    num_prompts: int
    method: str


@dataclass(frozen=True)
class SourceSummary:
    """One data source; `mean` is None where no response has a score."""

    num_prompts: int
    num_scored: int
    num_unscored: int
    mean: Estimate | None
    pass_at: Mapping[int, Estimate]


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
                    tally.drop(item)

        grader = make_grader(custom if custom is not None else default_compute_score, config)
        try:
            grade_all(tasks(), grader, on_grade=tally.add)
        finally:
            grader.close()
    return tally.evaluation()


def plan_lines(config: EvaluationConfig) -> Iterator[str]:
    """What would be graded, by what and where; the file and the function are looked at."""
    custom = custom_function(config)
    file = ResponseFile(config.data, needs_answer=custom is None)
    graders = "the built-in graders" if custom is None else name_of(custom)
    place = "a Ray cluster" if config.grading.controller == "ray" else "processes of this machine"
    yield f"plan: grade the responses of {file.num_rows} rows in {config.data.path}"
    yield f"  graders  {graders}, in {place}"
    yield f"  result   {config.data.output_path or 'on the terminal only'}"


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


def make_grader(function: RewardFunction, config: EvaluationConfig) -> PositionalCalls | RayCalls:
    grading, ray_init = config.grading, dict(config.ray_kwargs.ray_init)
    if grading.controller == "ray":
        return RayCalls(
            function,
            num_workers=grading.num_workers,
            timeout_seconds=grading.timeout_seconds,
            ray_init=ray_init,
        )
    asked = grading.num_workers or ray_init.get("num_cpus")
    return PositionalCalls(
        function,
        num_processes=one_per_core() if asked is None else int(asked),
        timeout_seconds=grading.timeout_seconds,
    )


@dataclass
class PromptScores:
    """What became of the responses to one prompt."""

    scores: list[float] = field(default_factory=list)
    num_passed: int = 0


def estimates_of_pass_at_k(prompts: Sequence[PromptScores]) -> dict[int, Estimate]:
    """For k = 1, 2, 4, ... and the most scores a prompt has; over the prompts with at least k."""
    values: dict[int, list[float]] = defaultdict(list)
    most = max((len(prompt.scores) for prompt in prompts), default=0)
    for k in dict.fromkeys([1, *subset_sizes(most)]) if most else []:
        for prompt in prompts:
            if len(prompt.scores) >= k:
                values[k].append(pass_at_k(len(prompt.scores), prompt.num_passed, k))
    return {k: within_unit(estimate(entries)) for k, entries in values.items()}


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of one value per prompt, with its interval."""
    mean, count = fmean(values), len(values)
    if all(value in (0, 1) for value in values):
        low, high = wilson_interval(mean, count)
        return Estimate(mean, low, high, count, "Wilson")
    if count == 1:
        return Estimate(mean, None, None, count, "none")
    half = Z * stdev(values) / sqrt(count)
    return Estimate(mean, mean - half, mean + half, count, "normal")


class Tally:
    """Scores by data source and row; the texts are not kept."""

    def __init__(self, pass_threshold: float) -> None:
        self._pass_threshold = pass_threshold
        self._prompts: dict[str, dict[int, PromptScores]] = defaultdict(dict)
        self._unscored: list[Unscored] = []

    def add(self, task: Task, grade: Grade) -> None:
        if not isinstance(grade, Score):
            self.drop(Unscored(task.row, task.number, task.data_source, grade.reason))
            return
        prompt = self._prompts[task.data_source].setdefault(task.row, PromptScores())
        prompt.scores.append(grade.value)
        prompt.num_passed += accuracy(grade) >= self._pass_threshold

    def drop(self, unscored: Unscored) -> None:
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
            shown = [f"{value.value:.4f}", interval_text(value), str(value.num_prompts)]
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
        label = f"row {one.row}" + (f", response {one.number}" if one.number is not None else "")
        yield f"  {label}: {printable(one.reason, max_characters=300)}"
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


CONFIDENCE = 0.95
Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)


def summarise(prompts: Collection[PromptScores], num_unscored: int) -> SourceSummary:
    """Sum up one data source."""
    scored = [prompt for prompt in prompts if prompt.scores]
    return SourceSummary(
        num_prompts=len(prompts),
        num_scored=sum(len(prompt.scores) for prompt in scored),
        num_unscored=num_unscored,
        mean=estimate([fmean(prompt.scores) for prompt in scored]) if scored else None,
        pass_at=estimates_of_pass_at_k(scored),
    )


def within_unit(found: Estimate) -> Estimate:
    """The interval of a chance ends at 0 and 1."""
    if found.low is None or found.high is None:
        return found
    return replace(found, low=max(0.0, found.low), high=min(1.0, found.high))


def wilson_interval(share: float, count: int) -> tuple[float, float]:
    """Where the true share may lie, given `share` of `count` draws (Wilson 1927).

    (p + z^2/2n +- z sqrt(p (1 - p)/n + z^2/4n^2)) / (1 + z^2/n)
    """
    scale = 1 + Z**2 / count
    centre = (share + Z**2 / (2 * count)) / scale
    half = Z * sqrt(share * (1 - share) / count + (Z / (2 * count)) ** 2) / scale
    return max(0.0, centre - half), min(1.0, centre + half)

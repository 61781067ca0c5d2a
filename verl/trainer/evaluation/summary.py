"""Mean score and pass@k of each data source, with 95% confidence intervals.

Prompts count equally and are what was drawn at random, so every number is a mean over prompts: of
the mean score of a prompt's responses, or of its pass@k (arXiv:2107.03374). The interval is

    Wilson's score interval, where every prompt's value is 0 or 1: it does not shrink to nothing
    when all are right, and never leaves [0, 1];
    mean +- 1.96 standard errors otherwise, with the prompts' standard deviation, so that responses
    to one prompt are not taken for independent ones (arXiv:2411.00640).

A response without a score takes no part; it is counted.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import sqrt
from statistics import NormalDist, fmean, stdev

from verl.trainer.ppo.validation_metrics import pass_at_k, subset_sizes

CONFIDENCE = 0.95
Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)


@dataclass
class PromptScores:
    """What became of the responses to one prompt."""

    scores: list[float] = field(default_factory=list)
    num_passed: int = 0


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

"""How well the policy answers held-out prompts, with N answers to each.

For each data source, each variable that the reward reports (`reward`, `acc`, ...) and each prompt:
the mean over its N answers, and what the best, the worst or the most common of n of them would
score, estimated by drawing n answers with replacement many times. Prompts count equally.

An answer that does not report a variable holds None there. It is skipped and counted, so the
values after it stay with their own answers.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from math import comb
from typing import Any

import numpy as np

NUM_DRAWS = 1000

Nested = dict[str, dict[str, dict[str, float]]]


def process_validation_metrics(
    data_sources: Sequence[str],
    sample_uids: Sequence[Hashable],
    infos_dict: Mapping[str, Sequence[Any]],
    seed: int = 42,
) -> Nested:
    """Metrics as `[data source][variable][metric]`.

    One entry per answer in each argument; answers with the same uid belong to one prompt. N is the
    largest number of answers any prompt of the data source has. The metrics are `mean@N`, `std@N`
    and, for n = 2, 4, 8, ... below N and N itself, `best@n/mean`, `best@n/std`, `worst@n/...` and,
    where answers report `pred`, `maj@n/...`. Variables that hold text have none.
    `num_missing` counts the answers without a value, where there are any.
    """
    for name, values in {"sample_uids": sample_uids, **infos_dict}.items():
        if len(values) != len(data_sources):
            raise ValueError(
                f"{name} has {len(values)} entries for {len(data_sources)} answers; "
                "an answer without a value needs None in its place"
            )
    rows_of: dict[str, dict[Hashable, list[int]]] = defaultdict(lambda: defaultdict(list))
    for row, (source, uid) in enumerate(zip(data_sources, sample_uids, strict=True)):
        rows_of[source][uid].append(row)
    return {
        source: {
            variable: variable_metrics(list(prompts.values()), variable, infos_dict, seed)
            for variable, values in infos_dict.items()
            if _is_numeric(values[row] for rows in prompts.values() for row in rows)
        }
        for source, prompts in rows_of.items()
    }


def variable_metrics(
    prompts: list[list[int]], variable: str, infos_dict: Mapping[str, Sequence[Any]], seed: int
) -> dict[str, float]:
    """Metrics of one variable over prompts, each given as the rows of its answers."""
    num_answers = max(map(len, prompts))
    values, votes = infos_dict[variable], infos_dict.get("pred")
    present = [[row for row in rows if values[row] is not None] for rows in prompts]
    per_prompt: dict[str, list[float]] = defaultdict(list)
    for rows in filter(None, present):
        answers = np.array([float(values[row]) for row in rows])
        ballots = None if votes is None else [votes[row] for row in rows]
        for name, value in prompt_metrics(answers, ballots, num_answers, seed).items():
            per_prompt[name].append(value)
    metrics = {name: float(np.mean(entries)) for name, entries in per_prompt.items()}
    num_missing = sum(map(len, prompts)) - sum(map(len, present))
    return metrics | ({"num_missing": float(num_missing)} if num_missing else {})


def prompt_metrics(
    answers: np.ndarray, votes: list[Any] | None, num_answers: int, seed: int
) -> dict[str, float]:
    """Metrics of one prompt: `answers` are the values present, N is `num_answers`."""
    metrics = {f"mean@{num_answers}": float(np.mean(answers))}
    if num_answers == 1:
        return metrics
    metrics[f"std@{num_answers}"] = float(np.std(answers))
    voted = [i for i, vote in enumerate(votes) if vote is not None] if votes is not None else []
    for n in subset_sizes(num_answers):
        draws = answers[bootstrap_rows(len(answers), n, NUM_DRAWS, seed)]  # (draws, n)
        metrics |= _mean_and_std(f"best@{n}", draws.max(1))
        metrics |= _mean_and_std(f"worst@{n}", draws.min(1))
        if votes is not None and voted:
            elected = majority_values([votes[i] for i in voted], answers[voted], n, seed)
            metrics |= _mean_and_std(f"maj@{n}", elected)
    return metrics


def majority_values(votes: list[Any], values: np.ndarray, n: int, seed: int) -> np.ndarray:
    """The value of the most common vote in each draw, as `calc_maj_val` finds it."""
    codes = {vote: code for code, vote in enumerate(dict.fromkeys(map(str, votes)))}
    rows = bootstrap_rows(len(votes), n, NUM_DRAWS, seed)  # (draws, n)
    ballots = np.array([codes[str(vote)] for vote in votes])[rows]
    num_alike = (ballots[:, :, None] == ballots[:, None, :]).sum(-1)  # (draws, n)
    winner = num_alike.argmax(1)  # the first answer whose vote is the most common
    return values[rows[np.arange(len(rows)), winner]]


def bootstrap_metric(
    data: Sequence[Any],
    subset_size: int,
    reduce_fns: Sequence[Callable[[list[Any]], float]],
    n_bootstrap: int = 1000,
    seed: int = 42,
) -> list[tuple[float, float]]:
    """Mean and standard deviation of each function over draws of `subset_size` with replacement."""
    rows = bootstrap_rows(len(data), subset_size, n_bootstrap, seed)
    draws = [[data[i] for i in draw] for draw in rows]
    values = [[reduce(draw) for draw in draws] for reduce in reduce_fns]
    return [(float(np.mean(results)), float(np.std(results))) for results in values]


def calc_maj_val(data: Sequence[Mapping[str, Any]], vote_key: str, val_key: str) -> float:
    """The value of the answer that most agree on; among equally common ones, the first's."""
    votes = [str(entry[vote_key]) for entry in data]
    winner, _ = Counter(votes).most_common(1)[0]
    return data[votes.index(winner)][val_key]


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """The chance that at least one of k answers is right (arXiv:2107.03374, section 2.1).

        1 - C(n - c, k) / C(n, k)       n answers, of which c are right

    Unbiased, unlike `best@k`, which draws with replacement and so sees the same answer twice.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@k needs 1 <= k <= {num_samples} (the number of samples), got k={k}")
    if not 0 <= num_correct <= num_samples:
        raise ValueError(f"{num_correct} correct answers of {num_samples} are impossible")
    return 1 - comb(num_samples - num_correct, k) / comb(num_samples, k)


def collect_reward_extras(samples: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Columns from what each answer reports: the union of their keys, None where one is missing."""
    keys = dict.fromkeys(key for sample in samples for key in sample)
    return {key: [sample.get(key) for sample in samples] for key in keys}


def name_validation_metrics(metrics: Nested) -> dict[str, float]:
    """`val-core/<source>/<variable>/<metric>` for the headline numbers, `val-aux/...` for the rest.

    Core are mean, maj and best at N of `acc`, or of `reward` where no `acc` is reported.
    """
    named: dict[str, float] = {}
    for source, variables in metrics.items():
        core_variable = "acc" if "acc" in variables else "reward"
        for variable, values in variables.items():
            largest = max((_subset_size(metric) for metric in values), default=0)
            for metric, value in values.items():
                is_core = (
                    variable == core_variable
                    and metric.startswith(("mean@", "maj@", "best@"))
                    and _subset_size(metric) == largest
                )
                section = "val-core" if is_core else "val-aux"
                named[f"{section}/{source}/{variable}/{metric}"] = value
    return named


def subset_sizes(num_answers: int) -> list[int]:
    """2, 4, 8, ... below N, then N."""
    sizes = [2**i for i in range(1, num_answers.bit_length()) if 2**i < num_answers]
    return [*sizes, num_answers]


def bootstrap_rows(count: int, subset_size: int, n_bootstrap: int, seed: int) -> np.ndarray:
    """Which of `count` entries each draw takes, (n_bootstrap, subset_size); the numbers of numpy's
    legacy generator, `choice` for one draw after another."""
    if not count:
        raise ValueError("there is nothing to draw from: the data is empty")
    return np.random.RandomState(seed).choice(count, size=(n_bootstrap, subset_size))


def _mean_and_std(name: str, values: np.ndarray) -> dict[str, float]:
    return {f"{name}/mean": float(values.mean()), f"{name}/std": float(values.std())}


def _subset_size(metric: str) -> int:
    number = metric.partition("@")[2].partition("/")[0]
    return int(number) if number else 0


def _is_numeric(values: Iterable[Any]) -> bool:
    present = [value for value in values if value is not None]
    kinds = (int, float, np.bool_, np.integer, np.floating)
    return bool(present) and all(isinstance(value, kinds) for value in present)

"""From a configuration to an `Evaluation`: every response of the file graded and summed up."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

from verl.config.evaluation import EvaluationConfig
from verl.config.faults import ConfigError, Fault
from verl.protocol.trajectory import Grade, Score
from verl.trainer.evaluation.grading import LocalWorkers, RewardFunction, Workers, grade_all
from verl.trainer.evaluation.ray_workers import RayWorkers
from verl.trainer.evaluation.responses import ResponseFile, Task, Unscored
from verl.trainer.evaluation.summary import PromptScores, SourceSummary, summarise
from verl.trainer.ppo.reward import get_custom_reward_fn, name_of, takes_whole_batch
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

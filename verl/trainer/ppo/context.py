"""What belongs to one step: its number, its random numbers, its groups, what it reports.

No state of a step lives on the trainer, so two steps can be in flight, each with a context.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from verl.config.ppo import PPOConfig
from verl.protocol import DataProto
from verl.protocol.padded import Padding, padded_batch
from verl.protocol.trajectory import Group, Score, Trajectory
from verl.trainer.ppo.workers import RunWorkers
from verl.utils.checkpoint.layout import note_phase
from verl.utils.metric import reduce_metrics
from verl.utils.profiler import marked_timer
from verl.utils.scramble import keyed_seed
from verl.workers.rollout.publish import Publisher


class Report:
    """Metrics and timings of a step."""

    def __init__(self) -> None:
        self.metrics: dict[str, Any] = {}
        self.timing: dict[str, float] = {}
        self.step: int | None = None
        """None before the first and after the last."""

    def add(self, name: str, value: Any) -> None:
        self.metrics[name] = value

    def count(self, metrics: Mapping[str, float]) -> None:
        """Add to numbers that a step counts in several parts."""
        for name, value in metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + value

    def timed(self, stage: str) -> AbstractContextManager[None]:
        note_phase(stage if self.step is None else f"{stage} of step {self.step}")
        return marked_timer(stage, self.timing)

    def merge(self, metrics: Mapping[str, Any], *, keeps_own: bool = False) -> None:
        """Take in metrics, each list of values reduced to one; with `keeps_own`, only new names."""
        parts = {k: v for k, v in metrics.items() if not isinstance(v, int | float)}
        found = {**metrics, **reduce_metrics(parts)}
        self.metrics = {**found, **self.metrics} if keeps_own else {**self.metrics, **found}


@dataclass(kw_only=True)
class StepContext:
    """What a stage may read beside the batch; one object per step in flight."""

    step: int
    config: PPOConfig
    workers: RunWorkers
    publisher: Publisher
    run_seed: int
    report: Report = field(default_factory=Report)
    num_prompts: int = 0
    """Prompts drawn so far."""

    groups: list[Group] = field(default_factory=list)
    """What the step trains on, before grading drops any."""

    def __post_init__(self) -> None:
        self.report.step = self.step

    def seed_of(self, uid: str, sample: int) -> int:
        """The seed of a trajectory that is drawn in this step."""
        return keyed_seed(self.run_seed, "training", self.step, uid, sample)


@dataclass
class StepBatch:
    """Groups and their padded columns, which are made once, when somebody asks."""

    groups: list[Group]
    padding: Padding
    with_versions: bool = False
    """Whether tokens may have been sampled by several policies: adds `policy_versions`."""

    @cached_property
    def trajectories(self) -> list[Trajectory]:
        return [trajectory for group in self.groups for trajectory in group.trajectories]

    @cached_property
    def data(self) -> DataProto:
        batch = padded_batch(self.trajectories, self.padding, with_versions=self.with_versions)
        versions = {group.version for group in self.groups}
        if len(versions) == 1 and None not in versions:
            (batch.meta_info["policy_version"],) = versions  # every token was sampled with it
        scores = [t.grade for t in self.trajectories if isinstance(t.grade, Score)]
        if len(scores) == len(batch) and all(score.token_values is not None for score in scores):
            add_scores(batch, scores)
        return batch


def add_scores(batch: DataProto, scores: list[Score]) -> None:
    """`token_level_scores`, and a column for each thing that graders reported."""
    values = np.stack([score.token_values for score in scores if score.token_values is not None])
    batch.batch["token_level_scores"] = torch.from_numpy(values)
    names = dict.fromkeys(name for score in scores for name in score.extras)
    for name in names:
        batch.non_tensor_batch[name] = object_array(score.extras.get(name) for score in scores)
    batch.meta_info["reward_extra_keys"] = list(names)


def object_array(values: Any) -> np.ndarray:
    """One object per row, also if the objects are lists of one length."""
    entries = list(values)
    column = np.empty(len(entries), dtype=object)
    for row, entry in enumerate(entries):
        column[row] = entry
    return column

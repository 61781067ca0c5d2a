"""What the built-in reward managers have in common: they grade, and rewards follow from grades.

`grade` gives one `Score`, `Abstain` or `InfraError` per response, for a caller that can set
responses aside. Calling a manager returns a reward tensor, and refuses to if any response has no
score. Most managers judge each response by itself: `judge` is what such a manager defines, and
`open_round` lets a caller hand in responses while others are still generated.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from verl.protocol import DataProto
from verl.workers.reward_manager.abstract import precomputed_rewards, scores_on_last_token
from verl.workers.reward_manager.results import Grade, Score, as_result
from verl.workers.reward_manager.rounds import GradingRound

DEFAULT_TIMEOUT_SECONDS = 60.0


class UngradedResponses(RuntimeError):
    """Some responses have no score, and a tensor of rewards has no place for that."""


class GradingManager(ABC):
    """A reward manager that says of each response whether it could be graded."""

    @abstractmethod
    def grade(self, data: DataProto) -> list[Grade]:
        """One grade per response, in their order, whatever order they were finished in."""

    def __call__(self, data: DataProto, return_dict: bool = False) -> Tensor | dict[str, Any]:
        result = precomputed_rewards(data)
        if result is None:
            result = required_rewards(data, self.grade(data))
        return result if return_dict else result["reward_tensor"]

    @classmethod
    def options_of(cls, config: Any) -> dict[str, Any]:
        """Keyword arguments that the configuration has beside `reward_model.reward_kwargs`."""
        return {}


class PerResponseManager(GradingManager):
    """Judges every response by itself, `max_concurrent` at a time."""

    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    max_concurrent: int = 64

    @abstractmethod
    def responses(self, data: DataProto) -> list[Any]:
        """The rows of a batch in the form that `judge` takes."""

    @abstractmethod
    async def judge(self, response: Any) -> Grade:
        """Grade one response within `timeout_seconds`, leaving the response as it is."""

    async def run_single(self, data: DataProto) -> dict[str, Any]:
        """Grade a batch of one response: `reward_score` and `reward_extra_info`.

        `results.as_result` says how a response without a score is marked.
        """
        return as_result(await self.judge(self.responses(data)[0]))

    def open_round(self) -> GradingRound:
        """For responses that come one by one, each in the form of `responses`."""
        return GradingRound(
            self.judge, timeout_seconds=self.timeout_seconds, max_concurrent=self.max_concurrent
        )

    def grade(self, data: DataProto) -> list[Grade]:
        grading = self.open_round()
        grading.add_all(enumerate(self.responses(data)))
        return grading.grades()


def required_rewards(data: DataProto, grades: Sequence[Grade]) -> dict[str, Any]:
    """`graded_rewards`, where every response must have a score."""
    faults = {row: grade for row, grade in enumerate(grades) if not isinstance(grade, Score)}
    if faults:
        row, first = next(iter(faults.items()))
        raise UngradedResponses(
            f"{len(faults)} of {len(grades)} responses have no score; row {row}: {first}"
        )
    return graded_rewards(data, grades)


def graded_rewards(data: DataProto, grades: Sequence[Grade]) -> dict[str, Any]:
    """`reward_tensor` (B, T), 0 where there is no score, and what graders reported besides."""
    scores = torch.tensor([g.value if isinstance(g, Score) else 0.0 for g in grades])
    extras = [g.extras if isinstance(g, Score) else {} for g in grades]
    names = dict.fromkeys(name for entry in extras for name in entry)
    return {
        "reward_tensor": scores_on_last_token(scores, data),
        "reward_extra_info": {name: [entry.get(name) for entry in extras] for name in names},
    }


def with_accuracy(data: DataProto, result: Tensor | dict[str, Any]) -> Tensor | dict[str, Any]:
    """The result of calling a manager; the scores also become the batch's column `acc`, (B,)."""
    rewards = result["reward_tensor"] if isinstance(result, dict) else result
    data.batch["acc"] = rewards.sum(-1)
    return result

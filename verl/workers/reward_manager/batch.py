"""`BatchRewardManager`: one call of the reward function for a whole batch.

    compute_score(data_sources, solution_strs, ground_truths, extra_infos, **options) -> list

For functions that are fast on many responses at once, such as one request to a model that judges.
Each entry of the list is what a function for one response might return. A list of another length
says nothing about any response, so all of them are faults then.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from verl.protocol import DataProto
from verl.workers.reward_manager.abstract import AbstractRewardManager
from verl.workers.reward_manager.grading import GradingManager, with_accuracy
from verl.workers.reward_manager.guarded_call import GuardedCall
from verl.workers.reward_manager.response import Response, responses_of
from verl.workers.reward_manager.results import Grade, InfraError, safe_grade
from verl.workers.reward_manager.rounds import GradingLoop

DEFAULT_BATCH_SECONDS = 600.0


class BatchRewardManager(GradingManager, AbstractRewardManager):
    """`timeout_seconds` is for the whole batch; other keyword arguments go to the function."""

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: Callable[..., Any],
        reward_fn_key: str = "data_source",
        *,
        timeout_seconds: float = DEFAULT_BATCH_SECONDS,
        **reward_kwargs: Any,
    ) -> None:
        super().__init__(tokenizer, num_examine, compute_score, reward_fn_key)
        self.timeout_seconds = timeout_seconds
        self.reward_kwargs = reward_kwargs
        self._call = GuardedCall(compute_score, timeout_seconds=timeout_seconds)

    def grade(self, data: DataProto) -> list[Grade]:
        responses = responses_of(data, self.tokenizer, self.reward_fn_key)
        work = self._call.outcome({**list_arguments(responses), **self.reward_kwargs})
        try:
            result = GradingLoop.current().run(work, self.timeout_seconds + 1.0)
        except TimeoutError as error:
            result = InfraError(str(error), is_timeout=True)
        return grades_of(result, len(responses))

    def __call__(self, data: DataProto, return_dict: bool = False) -> Tensor | dict[str, Any]:
        return with_accuracy(data, super().__call__(data, return_dict))


def list_arguments(responses: Sequence[Response]) -> dict[str, list[Any]]:
    """`data_sources` and so on: the arguments of all calls, a list per name."""
    calls = [response.call_arguments() for response in responses]
    return {
        "data_sources": [call["data_source"] for call in calls],
        "solution_strs": [call["solution_str"] for call in calls],
        "ground_truths": [call["ground_truth"] for call in calls],
        "extra_infos": [call["extra_info"] for call in calls],
    }


def grades_of(result: Any, num_responses: int) -> list[Grade]:
    """One grade per response, from what the function returned for all of them."""
    if isinstance(result, InfraError):
        return [result] * num_responses
    fault = fault_of(result, num_responses)
    if fault is not None:
        return [fault] * num_responses
    return [safe_grade(entry) for entry in result]


def fault_of(result: Any, num_responses: int) -> InfraError | None:
    if not isinstance(result, Sequence | np.ndarray | Tensor) or isinstance(result, str | bytes):
        text = f"{type(result).__name__}: {result!r:.200}"
    elif isinstance(result, np.ndarray | Tensor) and result.ndim != 1:
        text = f"values of shape {tuple(result.shape)}"
    elif len(result) != num_responses:
        text = f"{len(result)} values"
    else:
        return None
    return InfraError(
        f"the reward function returned {text} for {num_responses} responses; it must return a list "
        "with one entry for each"
    )

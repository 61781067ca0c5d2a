"""`PrimeRewardManager`: like `naive`, with the reward function in processes that can be killed.

For functions that use much processor time, may hang inside C code, or crash. The processes see the
program as it was when the manager was made. See `worker_pool` for what happens to one that dies.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from verl.protocol import DataProto
from verl.workers.reward_manager.grading import with_accuracy
from verl.workers.reward_manager.guarded_call import GuardedCall
from verl.workers.reward_manager.naive import NaiveRewardManager
from verl.workers.reward_manager.results import Score
from verl.workers.reward_manager.rounds import GradingRound

DEFAULT_ITEM_SECONDS = 300.0
MAX_PROCESSES = 64


class PrimeRewardManager(NaiveRewardManager):
    """`num_workers` processes (one per core, at most 64), `timeout_seconds` for one response."""

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: Callable[..., Any] | None = None,
        reward_fn_key: str = "data_source",
        *,
        timeout_seconds: float = DEFAULT_ITEM_SECONDS,
        num_workers: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            tokenizer,
            num_examine,
            compute_score,
            reward_fn_key,
            timeout_seconds=timeout_seconds,
            num_workers=one_per_core() if num_workers is None else num_workers,
            isolate=True,
            **kwargs,
        )

    def __call__(self, data: DataProto, return_dict: bool = False) -> Tensor | dict[str, Any]:
        return with_accuracy(data, super().__call__(data, return_dict))


def one_per_core() -> int:
    return min(MAX_PROCESSES, os.cpu_count() or 1)


async def parallel_compute_score_async(
    evaluation_func: Callable[..., Any],
    completions: Sequence[str],
    references: Sequence[Any],
    tasks: Sequence[str],
    extra_info: Sequence[Any] | None = None,
    num_processes: int = MAX_PROCESSES,
) -> list[float | None]:
    """Score completions in processes: `evaluation_func(task, completion, reference, extra_info)`.

    The scores stand in the order of the completions. One that could not be scored (an error, more
    than 300 seconds, a process that died again and again) has None: it is not a score of 0.
    """

    def call(*, arguments: Sequence[Any]) -> Any:
        return evaluation_func(*arguments)

    infos = [None] * len(completions) if extra_info is None else extra_info
    guarded = GuardedCall(
        call, timeout_seconds=DEFAULT_ITEM_SECONDS, num_workers=num_processes, isolate=True
    )
    grading = GradingRound(
        lambda arguments: guarded({"arguments": arguments}),
        timeout_seconds=DEFAULT_ITEM_SECONDS,
        max_concurrent=num_processes,
    )
    grading.add_all(enumerate(zip(tasks, completions, references, infos, strict=True)))
    try:
        grades = grading.grades()
    finally:
        guarded.close()
    return [grade.value if isinstance(grade, Score) else None for grade in grades]

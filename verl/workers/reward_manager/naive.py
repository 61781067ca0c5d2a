"""`NaiveRewardManager`: every response by itself, decoded and given to the reward function."""

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

from verl.protocol import DataProto
from verl.utils.py_functional import printable
from verl.utils.reward_score import default_compute_score
from verl.workers.reward_manager.abstract import AbstractRewardManager
from verl.workers.reward_manager.grading import DEFAULT_TIMEOUT_SECONDS, PerResponseManager
from verl.workers.reward_manager.guarded_call import GuardedCall, Pool
from verl.workers.reward_manager.response import Response, responses_of
from verl.workers.reward_manager.results import Grade
from verl.workers.reward_manager.worker_pool import WorkerPool

logger = logging.getLogger(__name__)


class NaiveRewardManager(PerResponseManager, AbstractRewardManager):
    """Calls `compute_score(data_source, solution_str, ground_truth, extra_info)` per response.

    `reward_model.reward_kwargs` may set `timeout_seconds` (of one call), `num_workers` (calls at
    the same time, for a function that is not async), `max_concurrent` (for one that is) and
    `isolate` (run the calls in `num_workers` processes that can be killed); `guarded_call` says
    what each can cut off.
    """

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: Callable[..., Any] | None = None,
        reward_fn_key: str = "data_source",
        *,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        num_workers: int = 1,
        max_concurrent: int = 64,
        isolate: bool = False,
        make_pool: Callable[..., Pool] = WorkerPool,
        **kwargs: Any,
    ) -> None:
        super().__init__(tokenizer, num_examine, compute_score, reward_fn_key, **kwargs)
        self.compute_score = compute_score or default_compute_score
        self._call = GuardedCall(
            self.compute_score,
            timeout_seconds=timeout_seconds,
            num_workers=num_workers,
            max_concurrent=max_concurrent,
            isolate=isolate,
            make_pool=make_pool,
        )
        self.timeout_seconds = timeout_seconds
        self.max_concurrent = self._call.max_concurrent
        self._num_examined: Counter[str] = Counter()

    def responses(self, data: DataProto) -> list[Response]:
        return responses_of(data, self.tokenizer, self.reward_fn_key)

    async def judge(self, response: Response) -> Grade:
        grade = await self._call(response.call_arguments())
        self._examine(response, grade)
        return grade

    def _examine(self, response: Response, grade: Grade) -> None:
        source = str(response.data_source)
        if self._num_examined[source] < self.num_examine:
            self._num_examined[source] += 1
            logger.info(
                "%s: response %s; ground truth %s; %s", printable(source),
                printable(response.solution_str, max_characters=2000),
                printable(response.ground_truth, max_characters=200), printable(grade),
            )  # fmt: skip

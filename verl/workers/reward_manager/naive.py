"""`NaiveRewardManager`: every response by itself, decoded and given to the reward function.

Grading one response is the primitive (`run_single`); grading a batch is many of these. Each result
is a `Score`, an `Abstain` or an `InfraError`. `grade` hands them out as they are, for a caller that
can set responses aside; calling the manager returns a reward tensor, and refuses to if any response
has no score.
"""

import asyncio
import copy
import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl.protocol import DataProto
from verl.utils.printable import printable
from verl.utils.reward_score import default_compute_score
from verl.workers.reward_manager.abstract import (
    AbstractRewardManager,
    precomputed_rewards,
    scores_on_last_token,
)
from verl.workers.reward_manager.guarded_call import KILL_SECONDS, GuardedCall
from verl.workers.reward_manager.results import Grade, InfraError, Score

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT_SECONDS = 60.0


class UngradedResponses(RuntimeError):
    """Some responses have no score, and a tensor of rewards has no place for that."""


@dataclass(frozen=True)
class Response:
    """A response as a reward function sees it."""

    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: dict[str, Any]
    num_tokens: int


class NaiveRewardManager(AbstractRewardManager):
    """Calls `compute_score(data_source, solution_str, ground_truth, extra_info)` per response.

    `reward_model.reward_kwargs` may set `timeout_seconds` (of one call), `num_workers` (calls at
    the same time, for a function that is not async), `max_concurrent` (for one that is) and
    `isolate` (run each call in a child process); `guarded_call` says what each can cut off.
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
        **kwargs: Any,
    ) -> None:
        super().__init__(tokenizer, num_examine, compute_score, reward_fn_key, **kwargs)
        self._call = GuardedCall(
            compute_score or default_compute_score,
            timeout_seconds=timeout_seconds,
            num_workers=num_workers,
            max_concurrent=max_concurrent,
            isolate=isolate,
        )
        self._num_examined: Counter[str] = Counter()

    async def run_single(self, data: DataProto) -> Grade:
        """Grade a batch of one response."""
        return await self.judge(self.responses(data)[0])

    async def judge(self, response: Response) -> Grade:
        """Grade one response; the function gets copies, so that it cannot change the batch."""
        grade = await self._call(
            {
                "data_source": response.data_source,
                "solution_str": response.solution_str,
                "ground_truth": copy.deepcopy(response.ground_truth),
                "extra_info": copy.deepcopy(response.extra_info),
            }
        )
        self._examine(response, grade)
        return grade

    def grade(self, data: DataProto) -> list[Grade]:
        """One grade per response, in their order, whatever order they were finished in."""
        return GradingRound(self, self._call, self.responses(data)).run()

    def __call__(self, data: DataProto, return_dict: bool = False) -> Tensor | dict[str, Any]:
        result = precomputed_rewards(data)
        if result is None:
            result = self._rewards(data, self.grade(data))
        return result if return_dict else result["reward_tensor"]

    def responses(self, data: DataProto) -> list[Response]:
        """The rows of a batch as reward functions see them."""
        tokens, arrays = data.batch["responses"], data.non_tensor_batch
        num_positions = tokens.shape[1]
        mask = data.batch["attention_mask"][:, -num_positions:].bool()  # (B, T)
        ids = [row[kept].tolist() for row, kept in zip(tokens, mask, strict=True)]
        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        extras = _extra_infos(data)
        truths = arrays.get("reward_model", [{"ground_truth": None}] * len(data))
        return [
            Response(
                data_source=arrays[self.reward_fn_key][row],
                solution_str=texts[row],
                ground_truth=truths[row]["ground_truth"],
                extra_info=extras[row],
                num_tokens=len(ids[row]),
            )
            for row in range(len(data))
        ]

    def _rewards(self, data: DataProto, grades: Sequence[Grade]) -> dict[str, Any]:
        faults = {row: g for row, g in enumerate(grades) if not isinstance(g, Score)}
        if faults:
            row, first = next(iter(faults.items()))
            raise UngradedResponses(
                f"{len(faults)} of {len(grades)} responses have no score; row {row}: {first}"
            )
        return graded_rewards(data, grades)

    def _examine(self, response: Response, grade: Grade) -> None:
        source = str(response.data_source)
        if self._num_examined[source] < self.num_examine:
            self._num_examined[source] += 1
            logger.info(
                "%s: response %s; ground truth %s; %s", printable(source),
                printable(response.solution_str, max_characters=2000),
                printable(response.ground_truth, max_characters=200), printable(grade),
            )  # fmt: skip


class GradingRound:
    """Grades the responses of one batch.

        caller's thread                     a thread of its own
          waits while grades come in          event loop: judge, `max_concurrent` at a time

    A function that blocks the event loop is given up like one that never returns: the caller leaves
    when no grade has come in for longer than a call may take. After some time-outs in a row the
    rest is not tried, for whatever the function waits for is not there.
    """

    MAX_TIMEOUTS_IN_A_ROW = 3

    def __init__(
        self, manager: NaiveRewardManager, call: GuardedCall, responses: Sequence[Response]
    ) -> None:
        self._manager = manager
        self._call = call
        self._responses = responses
        self._grades: dict[int, Grade] = {}
        self._timeouts_in_a_row = 0

    def run(self) -> list[Grade]:
        patience_seconds = self._call.timeout_seconds + 2 * KILL_SECONDS
        thread = threading.Thread(target=asyncio.run, args=(self._judge_all(),), daemon=True)
        thread.start()
        num_before = -1
        while thread.is_alive() and len(self._grades) > num_before:
            num_before = len(self._grades)
            thread.join(patience_seconds)
        missing = InfraError("grading stood still and was given up", is_timeout=True)
        return [self._grades.get(row, missing) for row in range(len(self._responses))]

    async def _judge_all(self) -> None:
        slots = asyncio.Semaphore(self._call.max_concurrent)

        async def judge(row: int) -> None:
            async with slots:
                self._grades[row] = await self._judge(self._responses[row])

        await asyncio.gather(*(judge(row) for row in range(len(self._responses))))

    async def _judge(self, response: Response) -> Grade:
        if self._timeouts_in_a_row >= self.MAX_TIMEOUTS_IN_A_ROW:
            return InfraError(f"not tried after {self._timeouts_in_a_row} time-outs in a row")
        grade = await self._manager.judge(response)
        is_timeout = isinstance(grade, InfraError) and grade.is_timeout
        self._timeouts_in_a_row = self._timeouts_in_a_row + 1 if is_timeout else 0
        return grade


def graded_rewards(data: DataProto, grades: Sequence[Grade]) -> dict[str, Any]:
    """`reward_tensor` (B, T), 0 where there is no score, and what graders reported besides."""
    scores = torch.tensor([g.value if isinstance(g, Score) else 0.0 for g in grades])
    extras = [g.extras if isinstance(g, Score) else {} for g in grades]
    names = dict.fromkeys(name for entry in extras for name in entry)
    return {
        "reward_tensor": scores_on_last_token(scores, data),
        "reward_extra_info": {name: [entry.get(name) for entry in extras] for name in names},
    }


def _extra_infos(data: DataProto) -> list[dict[str, Any]]:
    """The rows' own `extra_info`, and what the agent loop knows about the conversation."""
    arrays = data.non_tensor_batch
    own = arrays.get("extra_info", [None] * len(data))
    found = []
    for row in range(len(data)):
        extra = dict(own[row] or {})
        if "__num_turns__" in arrays:
            extra["num_turns"] = int(arrays["__num_turns__"][row])
        extra["rollout_reward_scores"] = (
            arrays["reward_scores"][row] if "reward_scores" in arrays else {}
        )
        found.append(extra)
    return found

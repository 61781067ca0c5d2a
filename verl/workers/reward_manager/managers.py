"""The built-in reward managers `naive`, `dapo`, `batch`, `rate_limited` and `model`.

How a reward function is called, and what can be cut off at the deadline of a call:

    async function    awaited on the grading event loop, and cancelled
    plain function    on one of `num_workers` threads; the thread is left behind and another takes
                      its place, for a thread cannot be killed
    isolate=True      in one of `num_workers` processes, which is killed and replaced; a process
                      that dies is replaced too, and the call made again

A thread shares the function's state with this process (caches, clients, models), which is what most
reward functions expect. It cannot be interrupted inside one long C call that keeps the interpreter
lock, such as a regular expression that backtracks for ever; functions that may do that on a model's
output need `isolate=True`, or the manager `prime`. The clock of a call starts with the function.
"""

import asyncio
import copy
import inspect
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from threading import Thread
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np
from torch import Tensor

from verl.protocol import DataProto
from verl.protocol.trajectory import Grade, InfraError, Score, Trajectory
from verl.utils.py_functional import printable
from verl.utils.reward_score import default_compute_score
from verl.utils.timeouts import within
from verl.utils.tokenizer import decode_texts
from verl.workers.reward_manager.abstract import (
    AbstractRewardManager,
    precomputed_rewards,
    with_accuracy,
)
from verl.workers.reward_manager.adapters import GradingManager
from verl.workers.reward_manager.grader import (
    DEFAULT_TIMEOUT_SECONDS,
    as_grade,
    contained,
    is_async,
)
from verl.workers.reward_manager.workers import WorkerPool

logger = logging.getLogger(__name__)

DEFAULT_BATCH_SECONDS = 600.0
LIMIT_OPTIONS = ("max_concurrent", "max_rpm", "max_tpm", "estimated_tokens_per_request", "timeout")


class Pool(Protocol):
    """Processes that grade; every call ends by itself."""

    def call(self, kwargs: Mapping[str, Any]) -> Grade: ...
    def close(self) -> None: ...


class FunctionManager(GradingManager, AbstractRewardManager):
    """What managers of a reward function have in common: the text, and the arguments of a call."""

    def prepare(self, trajectories: Sequence[Trajectory]) -> None:
        """Decode all responses at once."""
        undecoded = [trajectory for trajectory in trajectories if trajectory.text is None]
        if undecoded:
            texts = decode_texts(self.tokenizer, [t.response_ids for t in undecoded])
            for trajectory, text in zip(undecoded, texts, strict=True):
                trajectory.text = text

    def call_arguments(self, trajectory: Trajectory) -> dict[str, Any]:
        """What `compute_score` is called with: copies, so that it cannot change the batch."""
        columns = {**trajectory.row, **trajectory.extra_fields}
        if self.reward_fn_key not in columns:
            raise ValueError(
                f"the batch has no column {self.reward_fn_key!r}, which data.reward_fn_key names; "
                f"it has: {', '.join(sorted(columns))}"
            )
        truth = columns["reward_model"]["ground_truth"] if "reward_model" in columns else None
        return {
            "data_source": columns[self.reward_fn_key],
            "solution_str": trajectory.text,
            "ground_truth": copy.deepcopy(truth),
            "extra_info": copy.deepcopy(self.extra_info(trajectory, columns)),
        }

    def extra_info(self, trajectory: Trajectory, columns: Mapping[str, Any]) -> dict[str, Any]:
        """The row's own `extra_info`, and what the agent loop knows about the conversation."""
        info = dict(columns.get("extra_info") or {})
        if trajectory.num_turns >= 0:
            info["num_turns"] = trajectory.num_turns
        info["rollout_reward_scores"] = columns.get("reward_scores", {})
        return info | trajectory.extra_fields


class NaiveRewardManager(FunctionManager):
    """Calls `compute_score(data_source, solution_str, ground_truth, extra_info)` per response.

    `reward_model.reward_kwargs` may set `timeout_seconds` (of one call), `num_workers` (calls at
    the same time, for a function that is not async), `max_concurrent` (for one that is) and
    `isolate` (run the calls in `num_workers` processes that can be killed).
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
        function = compute_score or default_compute_score
        super().__init__(tokenizer, num_examine, function, reward_fn_key, **kwargs)
        require_positive(timeout_seconds=timeout_seconds, num_workers=num_workers)
        self.compute_score = function
        self.timeout_seconds = timeout_seconds
        self._is_awaited = is_async(function) and not isolate
        self.is_blocking = not self._is_awaited
        self.max_concurrent = num_workers if self.is_blocking else max_concurrent
        self.has_own_deadline = isolate  # the pool kills a process that takes too long
        self._pool = make_pool(function, timeout_seconds=timeout_seconds) if isolate else None
        self._num_examined: Counter[str] = Counter()

    def close(self) -> None:
        """End the processes of `isolate`."""
        if self._pool is not None:
            self._pool.close()

    async def grade(self, trajectory: Trajectory) -> Grade:
        self.prepare([trajectory])
        arguments = self.call_arguments(trajectory)
        if self._pool is not None:
            grade = self._pool.call(arguments)
        else:
            result: Any = self.compute_score(**arguments)
            grade = as_grade(await result if self._is_awaited else result)
        source = str(arguments["data_source"])
        if self._num_examined[source] < self.num_examine:
            self._num_examined[source] += 1
            logger.info(
                "%s: response %s; ground truth %s; %s", printable(source),
                printable(trajectory.text, max_characters=2000),
                printable(arguments["ground_truth"], max_characters=200), printable(grade),
            )  # fmt: skip
        return grade


class DAPORewardManager(NaiveRewardManager):
    """The score of a response, less a penalty for being too long (arXiv:2503.14476, section 3.4).

    Within the last `len` tokens below the longest allowed response the penalty grows from 0 to
    `penalty_factor`, so that a model learns to stop before it is cut off:

        min(0, -(length - (max_resp_len - len)) / len * penalty_factor)

    `overlong_buffer_cfg` has `enable`, `len`, `penalty_factor` and `log`; None is no penalty. A run
    sets `max_resp_len` to `data.max_response_length` unless `reward_kwargs` do.
    """

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: Callable[..., Any] | None = None,
        reward_fn_key: str = "data_source",
        max_resp_len: int | None = None,
        overlong_buffer_cfg: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(tokenizer, num_examine, compute_score, reward_fn_key, **kwargs)
        self.max_resp_len = max_resp_len
        self.overlong_buffer_cfg = overlong_buffer_cfg
        self._has_penalty = overlong_buffer_cfg is not None and bool(overlong_buffer_cfg["enable"])
        if self._has_penalty:
            self._check(overlong_buffer_cfg or {}, max_resp_len)

    @classmethod
    def options_of(cls, config: Any) -> dict[str, Any]:
        data = config.get("data", {})  # programs of one's own may have neither
        longest = "max_response_length"
        return {"max_resp_len": data[longest]} if longest in data else {}

    async def grade(self, trajectory: Trajectory) -> Grade:
        grade = await super().grade(trajectory)
        if not self._has_penalty or not isinstance(grade, Score):
            return grade
        penalty = self.penalty(trajectory.num_response_tokens)
        extras = dict(grade.extras)
        if (self.overlong_buffer_cfg or {}).get("log", False):
            extras |= {"overlong_reward": penalty, "overlong": penalty < 0}
        return Score(grade.value + penalty, extras)

    def penalty(self, num_tokens: int) -> float:
        """0 or less, for a response of that length."""
        buffer = self.overlong_buffer_cfg
        assert buffer is not None
        assert self.max_resp_len is not None
        excess = num_tokens - (self.max_resp_len - buffer["len"])
        return min(0.0, -excess / buffer["len"] * buffer["penalty_factor"])

    @staticmethod
    def _check(buffer: Mapping[str, Any], max_resp_len: int | None) -> None:
        where = "reward_model.reward_kwargs"
        missing = {"len", "penalty_factor"} - buffer.keys()
        if missing:
            raise ValueError(f"{where}.overlong_buffer_cfg lacks {sorted(missing)}")
        if max_resp_len is None or not 0 < buffer["len"] <= max_resp_len:
            raise ValueError(
                f"{where}.overlong_buffer_cfg.len is {buffer['len']}; it must be above 0 and at "
                f"most {where}.max_resp_len, which is {max_resp_len}"
            )


class BatchRewardManager(FunctionManager):
    """One call of the reward function for a whole step, within `timeout_seconds`.

        compute_score(data_sources, solution_strs, ground_truths, extra_infos, **options) -> list

    For functions that are fast on many responses at once, such as one request to a judge. Each
    entry of the list is what a function for one response might return. A list of another length
    says nothing about any response, so all of them have failed then. Other keyword arguments go to
    the function.
    """

    scope = "step"

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
        require_positive(timeout_seconds=timeout_seconds)
        self.timeout_seconds = timeout_seconds
        self.reward_kwargs = reward_kwargs
        self.is_blocking = not is_async(compute_score)

    def __call__(self, data: DataProto, return_dict: bool = False) -> Tensor | dict[str, Any]:
        return with_accuracy(data, super().__call__(data, return_dict))

    async def grade(self, trajectory: Trajectory) -> Grade:
        (grade,) = await self.grade_many([trajectory])
        return grade

    async def grade_many(self, trajectories: Sequence[Trajectory]) -> list[Grade]:
        self.prepare(trajectories)
        calls = [self.call_arguments(trajectory) for trajectory in trajectories]
        assert self.compute_score is not None
        result = self.compute_score(
            data_sources=[call["data_source"] for call in calls],
            solution_strs=[call["solution_str"] for call in calls],
            ground_truths=[call["ground_truth"] for call in calls],
            extra_infos=[call["extra_info"] for call in calls],
            **self.reward_kwargs,
        )
        result = result if self.is_blocking else await result
        return entries_of(result, len(calls))


def entries_of(result: Any, num_responses: int) -> list[Grade]:
    """One grade per response, from what a function returned for all of them."""
    if inspect.iscoroutine(result):
        return [as_grade(result)] * num_responses
    if not isinstance(result, Sequence | np.ndarray | Tensor) or isinstance(result, str | bytes):
        text = f"{type(result).__name__}: {result!r:.200}"
    elif isinstance(result, np.ndarray | Tensor) and result.ndim != 1:
        text = f"values of shape {tuple(result.shape)}"
    elif len(result) != num_responses:
        text = f"{len(result)} values"
    else:
        return [as_grade(entry) for entry in result]
    error = InfraError(
        f"the reward function returned {text} for {num_responses} responses; it must return a list "
        "with one entry for each"
    )
    return [error] * num_responses


class RateLimitedRewardManager(NaiveRewardManager):
    """For reward functions that ask a service with a quota.

    At most `max_concurrent` calls run at the same time, `max_rpm` start per minute, and calls that
    are taken to cost `estimated_tokens_per_request` use up at most `max_tpm` per minute. The limits
    hold for the process: managers of training and validation with the same limits share them. The
    time a call waits for its turn does not count towards its `timeout`.
    """

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: Callable[..., Any] | None = None,
        reward_fn_key: str = "data_source",
        *,
        max_concurrent: int = 1,
        max_rpm: int | None = None,
        max_tpm: int | None = None,
        estimated_tokens_per_request: int = 2000,
        timeout: float = 300.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            tokenizer,
            num_examine,
            compute_score,
            reward_fn_key,
            timeout_seconds=timeout,
            num_workers=max_concurrent,
            max_concurrent=max_concurrent,
            **kwargs,
        )
        self.has_own_deadline = True
        self.is_blocking = False  # it waits for its turn on the event loop
        self._limits = (max_concurrent, max_rpm, max_tpm)
        self._tokens_per_request = estimated_tokens_per_request

    async def grade(self, trajectory: Trajectory) -> Grade:
        limits = RateLimits.shared(*self._limits)
        async with limits.slots:
            if limits.requests is not None:
                await limits.requests.acquire(1.0)
            if limits.tokens is not None:
                await limits.tokens.acquire(self._tokens_per_request)
            call = super().grade(trajectory)
            work = contained(call) if self._is_awaited else on_thread(call)
            return await within(work, self.timeout_seconds)

    @classmethod
    def options_of(cls, config: Any) -> dict[str, Any]:
        section = config["reward_model"]
        return {name: section[name] for name in LIMIT_OPTIONS if name in section}


class AsyncTokenBucket:
    """Lets `rate_limit` tokens a second pass, and up to `max_tokens` at once after a pause.

    Starts full. Whoever takes more than there is leaves a debt and waits until the flow of tokens
    has paid it, so callers are served in their order and no request is too large.
    """

    def __init__(self, rate_limit: float, max_tokens: float | None = None) -> None:
        if rate_limit <= 0:
            raise ValueError(f"rate_limit is {rate_limit}; it must be above 0 tokens a second")
        self.rate_limit = rate_limit
        self.max_tokens = rate_limit if max_tokens is None else max_tokens
        self.tokens = self.max_tokens
        self.last_update: float | None = None  # when `tokens` was counted

    @classmethod
    def per_minute(cls, limit: int | None) -> "AsyncTokenBucket | None":
        """A second's worth may pass at once: a minute never sees much more than the limit."""
        return None if limit is None else cls(limit / 60, max(1.0, limit / 60))

    async def acquire(self, num_tokens: float = 1.0) -> None:
        now = time.monotonic()
        since = now if self.last_update is None else self.last_update
        grown = self.tokens + (now - since) * self.rate_limit
        self.tokens = min(self.max_tokens, grown) - num_tokens
        self.last_update = now
        if self.tokens < 0:
            await asyncio.sleep(-self.tokens / self.rate_limit)


class RateLimits:
    """The limits that calls share on one event loop."""

    _shared: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Any, "RateLimits"]] = (
        WeakKeyDictionary()
    )

    def __init__(self, max_concurrent: int, max_rpm: int | None, max_tpm: int | None) -> None:
        self.slots = asyncio.Semaphore(max_concurrent)
        self.requests = AsyncTokenBucket.per_minute(max_rpm)
        self.tokens = AsyncTokenBucket.per_minute(max_tpm)

    @classmethod
    def shared(cls, *limits: Any) -> "RateLimits":
        of_loop = cls._shared.setdefault(asyncio.get_running_loop(), {})
        if limits not in of_loop:
            of_loop[limits] = cls(*limits)
        return of_loop[limits]


class ModelRewardManager(AbstractRewardManager):
    """The reward model's score is the reward, in training and validation.

    Takes `rm_scores`, which the reward model's worker has put into the batch; asks nobody. `naive`
    does the same in training; in validation it grades rows that have an answer by rule.
    """

    def __call__(self, data: DataProto, return_dict: bool = False) -> Tensor | dict[str, Any]:
        result = precomputed_rewards(data)
        if result is None:
            raise ValueError(
                "the batch has no rm_scores; reward_manager.name=model takes the score of a reward "
                "model: set reward_model.enable=True and reward_model.model.path"
            )
        return result if return_dict else result["reward_tensor"]


def require_positive(**options: float) -> None:
    for name, value in options.items():
        if value <= 0:
            raise ValueError(f"{name} of the reward manager is {value}; it must be positive")


def on_thread(work: Coroutine[Any, Any, Grade]) -> "asyncio.Future[Grade]":
    """Run a coroutine that blocks on a thread of its own, which may be left behind."""
    future: Future[Grade] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(asyncio.run(contained(work)))
        except BaseException as error:
            is_usual = isinstance(error, Exception)
            future.set_exception(error if is_usual else RuntimeError(repr(error)))

    Thread(target=run, daemon=True, name="grading").start()
    return asyncio.wrap_future(future)

"""`RateLimitedRewardManager`: for reward functions that ask a service with a quota.

At most `max_concurrent` calls run at the same time, `max_rpm` start per minute, and calls that are
taken to cost `estimated_tokens_per_request` use up at most `max_tpm` per minute. The limits hold
for the process: managers of training and validation with the same limits share them.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from verl.workers.reward_manager.naive import NaiveRewardManager
from verl.workers.reward_manager.response import Response
from verl.workers.reward_manager.results import Grade

OPTIONS = ("max_concurrent", "max_rpm", "max_tpm", "estimated_tokens_per_request", "timeout")


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
        self._counted_at = time.monotonic()

    async def acquire(self, num_tokens: float = 1.0) -> None:
        now = time.monotonic()
        grown = self.tokens + (now - self._counted_at) * self.rate_limit
        self.tokens = min(self.max_tokens, grown) - num_tokens
        self._counted_at = now
        if self.tokens < 0:
            await asyncio.sleep(-self.tokens / self.rate_limit)


class RateLimits:
    """The limits that calls share on one event loop."""

    _known: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Any, "RateLimits"]] = (
        WeakKeyDictionary()
    )

    def __init__(self, max_concurrent: int, max_rpm: int | None, max_tpm: int | None) -> None:
        self.slots = asyncio.Semaphore(max_concurrent)
        self.requests = per_minute(max_rpm)
        self.tokens = per_minute(max_tpm)

    @classmethod
    def shared(cls, *limits: Any) -> "RateLimits":
        known = cls._known.setdefault(asyncio.get_running_loop(), {})
        if limits not in known:
            known[limits] = cls(*limits)
        return known[limits]


def per_minute(limit: int | None) -> AsyncTokenBucket | None:
    """A second's worth may pass at once, so that a minute never sees much more than the limit."""
    return None if limit is None else AsyncTokenBucket(limit / 60, max(1.0, limit / 60))


class RateLimitedRewardManager(NaiveRewardManager):
    """The time a call waits for its turn does not count towards its `timeout`."""

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
        self._limits = (max_concurrent, max_rpm, max_tpm)
        self._tokens_per_request = estimated_tokens_per_request

    async def judge(self, response: Response) -> Grade:
        limits = RateLimits.shared(*self._limits)
        async with limits.slots:
            if limits.requests is not None:
                await limits.requests.acquire(1.0)
            if limits.tokens is not None:
                await limits.tokens.acquire(self._tokens_per_request)
            return await super().judge(response)

    @classmethod
    def options_of(cls, config: Any) -> dict[str, Any]:
        section = config["reward_model"]
        return {name: section[name] for name in OPTIONS if name in section}

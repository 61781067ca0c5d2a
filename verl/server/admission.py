"""How many requests may be under way: so many run, so many wait, one more is refused.

    request --> [max_running run] <-- [max_waiting wait] <-- 429 with Retry-After

Whoever leaves, by whatever way, gives the place to the one that has waited longest.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from verl.server.errors import busy
from verl.server.metrics import ServerMetrics


class Admission:
    """Places for requests, for one event loop."""

    def __init__(self, max_running: int, max_waiting: int, metrics: ServerMetrics) -> None:
        self._places = asyncio.Semaphore(max_running)
        self._max_waiting = max_waiting
        self._metrics = metrics
        self.num_running = 0
        self.num_waiting = 0

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Wait for a place and keep it for the length of a `with` block."""
        await self._enter()
        try:
            yield
        finally:
            self.num_running -= 1
            self._places.release()
            self._report()

    async def _enter(self) -> None:
        if self._places.locked() and self.num_waiting >= self._max_waiting:
            raise busy(f"{self.num_waiting} requests are waiting already; try again later")
        self.num_waiting += 1
        try:
            await self._places.__aenter__()
        finally:
            self.num_waiting -= 1
            self._report()
        self.num_running += 1
        self._report()

    def _report(self) -> None:
        self._metrics.running.set(self.num_running)
        self._metrics.waiting.set(self.num_waiting)

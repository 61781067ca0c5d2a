"""A JSON service that tools ask: parallel requests, retries and outages in one place.

    ask -> thread (at most `max_parallel`) -> request -> reply
                                                |
                  503, 504, no connection: again, until `timeout_seconds` are over -> InfraFault
                  many faults: one thread probes the service, the others wait for it (`Breaker`)

What the service does wrong is never an error of the model's call: it is `InfraFault`, and the
trajectory gets no reward. Only `RequestRefused` is about the request itself.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from verl.protocol.trajectory import InfraFault
from verl.utils import breaker
from verl.utils.breaker import Breaker, Outage
from verl.utils.http_json import RequestFailed, request_json
from verl.utils.py_functional import printable

logger = logging.getLogger(__name__)

MAX_RESPONSE_BYTES = 4 << 20
FIRST_PAUSE_SECONDS = 0.25
MAX_PAUSE_SECONDS = 4.0
REFUSED = (400, 404, 413, 422)
PASSING = (429, 502, 503, 504)
"""Statuses that may pass by waiting."""


class RequestRefused(ValueError):
    """The service understood the request and will not serve it."""


class Service:
    """One service, for all trajectories of a run."""

    def __init__(
        self,
        name: str,
        url: str,
        *,
        token: str = "",
        timeout_seconds: float = 30.0,
        max_parallel: int = 64,
        max_response_bytes: int = MAX_RESPONSE_BYTES,
    ) -> None:
        if not timeout_seconds > 0:
            raise ValueError(f"timeout of {name} is {timeout_seconds}; it must be positive")
        if max_parallel < 1:
            raise ValueError(f"{name} may have {max_parallel} requests at once; allow at least one")
        self.name = name
        self.url = url.rstrip("/")
        self.timeout_seconds = timeout_seconds
        self._token = token
        self._max_response_bytes = max_response_bytes
        self._threads = ThreadPoolExecutor(max_parallel, thread_name_prefix=name)
        self._breaker = Breaker(f"{name} ({self.url})")
        self._is_probing = threading.Lock()
        self._worked: tuple[str, str, Mapping[str, Any] | None] | None = None
        """A repeatable request that was answered; the breaker's probe sends it again."""

    @property
    def deadline_seconds(self) -> float:
        """Longer than a request takes with all retries, and a pause of the breaker."""
        return 2 * self.timeout_seconds + breaker.MAX_PAUSE_SECONDS + 30.0

    async def ask(
        self,
        path: str = "",
        payload: Mapping[str, Any] | None = None,
        *,
        method: str = "POST",
        is_repeatable: bool = True,
    ) -> Any:
        """The JSON that the service replies; `InfraFault` where it gives none.

        A request that is not repeatable is sent again only if the service cannot have seen it.
        """
        request = method, f"{self.url}{path}", payload
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._ask, request, is_repeatable)

    def _ask(self, request: tuple[str, str, Mapping[str, Any] | None], is_repeatable: bool) -> Any:
        deadline = time.monotonic() + self.timeout_seconds
        pause = FIRST_PAUSE_SECONDS
        while True:
            self._wait_while_away(request, is_repeatable)
            try:
                reply = self._send(request, max(deadline - time.monotonic(), 0.01))
            except RequestFailed as failure:
                if failure.status in REFUSED:
                    self._breaker.note(None)
                    raise RequestRefused(printable(failure, max_characters=500)) from failure
                self._breaker.note(str(failure))
                may_pass = failure.status in PASSING or failure.status is None
                may_repeat = is_repeatable or not failure.was_sent
                if not (may_pass and may_repeat) or time.monotonic() + pause >= deadline:
                    raise InfraFault(self._story(failure)) from failure
            else:
                self._breaker.note(None)
                if is_repeatable:
                    self._worked = request
                return reply
            time.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_SECONDS)

    def _send(
        self, request: tuple[str, str, Mapping[str, Any] | None], timeout_seconds: float
    ) -> Any:
        method, url, payload = request
        return request_json(
            method,
            url,
            payload,
            timeout_seconds=timeout_seconds,
            max_response_bytes=self._max_response_bytes,
            token=self._token,
        )

    def _wait_while_away(
        self, request: tuple[str, str, Mapping[str, Any] | None], is_repeatable: bool
    ) -> None:
        probed = self._worked or (request if is_repeatable else None)
        if probed is None or not self._breaker.is_open:
            return

        def probe() -> float:
            try:
                self._send(probed, self.timeout_seconds)
            except RequestFailed as failure:
                return float(failure.status not in REFUSED)
            return 0.0

        with self._is_probing:
            if not self._breaker.is_open:  # another thread has seen it come back
                return
            try:
                if not self._breaker.pause(probe):  # it serves others: count from the start
                    self._breaker = Breaker(self._breaker.name)
            except Outage as outage:
                raise InfraFault(str(outage)) from outage

    def _story(self, failure: RequestFailed) -> str:
        hint = ""
        if failure.status in (401, 403):
            hint = "; it wants a token, read from the environment (docs/tool_services.md)"
        reason = printable(failure, max_characters=500)
        return f"{self.name} at {self.url} did not answer: {reason}{hint}"

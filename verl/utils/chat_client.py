"""`ChatClient`: ask a model behind an OpenAI endpoint, with limits, time-outs and retries."""

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from verl.utils import environment
from verl.utils.import_utils import require
from verl.utils.py_functional import printable

RETRIED_STATUSES = (408, 425, 429)
CHUNK_BYTES = 1 << 16

Message = Mapping[str, str]


class ChatUnavailable(RuntimeError):
    """The endpoint gave no answer; the message says what it said last."""


class _Refused(Exception):
    """One attempt that failed; `pause_seconds` is what the server asked for."""

    def __init__(self, text: str, *, is_final: bool = False, pause_seconds: float = 0.0) -> None:
        super().__init__(text)
        self.is_final = is_final
        self.pause_seconds = pause_seconds


@dataclass(frozen=True, kw_only=True)
class ChatEndpoint:
    """Where the model is, and its time-outs and retries."""

    url: str
    """Base address with the version, for example `http://127.0.0.1:8000/v1`."""

    model: str
    api_key_env: str | None = None
    """Environment variable that holds the key; None sends none."""

    request_timeout_seconds: float = 60.0
    """Limit for one attempt, from connecting to the last byte."""

    max_attempts: int = 4
    first_pause_seconds: float = 1.0
    """Pause after the first failure; it doubles with each one."""

    max_pause_seconds: float = 30.0
    max_response_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(
                f"the endpoint's url is {self.url!r}; it must be an address such as "
                "http://127.0.0.1:8000/v1"
            )
        if parts.username or parts.password:
            raise ValueError(
                "the endpoint's url holds a password, which would be logged; name an environment "
                "variable in api_key_env instead"
            )
        positive = ("request_timeout_seconds", "max_attempts", "max_response_bytes")
        for name, value in ((name, vars(self)[name]) for name in positive):
            if value <= 0:
                raise ValueError(f"{name} of the endpoint is {value}; it must be positive")


class ChatClient:
    """`await client.complete(messages)` is the text that the model answers."""

    def __init__(self, endpoint: ChatEndpoint) -> None:
        self.endpoint = endpoint
        self._aiohttp = require("aiohttp", extra="judge")
        self._jitter = random.Random()  # of its own: the run's generators stay as they are

    async def complete(self, messages: Sequence[Message], **sampling: Any) -> str:
        """Ask, and ask again where that may help. `sampling` goes into the request as it is."""
        request = {"model": self.endpoint.model, "messages": list(messages), **sampling}
        # A session per question: one that outlives its event loop could not be closed.
        limit = self._aiohttp.ClientTimeout(total=self.endpoint.request_timeout_seconds)
        async with self._aiohttp.ClientSession(timeout=limit) as session:
            for attempt in range(self.endpoint.max_attempts):
                try:
                    return await self._attempt(session, request)
                except _Refused as refused:
                    is_last = attempt == self.endpoint.max_attempts - 1
                    if refused.is_final or is_last:
                        raise ChatUnavailable(
                            f"{self._address} gave no answer in {attempt + 1} attempts; last: "
                            f"{refused}"
                        ) from refused
                    await asyncio.sleep(self._pause(attempt, refused.pause_seconds))
        raise AssertionError("the loop returns or raises")

    @property
    def _address(self) -> str:
        return f"{self.endpoint.url.rstrip('/')}/chat/completions"

    def _headers(self) -> dict[str, str]:
        name = self.endpoint.api_key_env
        if name is None:
            return {}
        key = environment.variable(name)
        if not key:
            raise ChatUnavailable(f"the environment variable {name} (api_key_env) is not set")
        return {"Authorization": f"Bearer {key}"}

    def _pause(self, attempt: int, asked_for: float) -> float:
        """Twice as long each time, up to half as much again, so that askers do not meet again."""
        endpoint = self.endpoint
        pause = max(endpoint.first_pause_seconds * 2**attempt, asked_for)
        return min(pause, endpoint.max_pause_seconds) * self._jitter.uniform(1.0, 1.5)

    async def _attempt(self, session: Any, request: Mapping[str, Any]) -> str:
        try:
            async with session.post(
                self._address, json=request, headers=self._headers(), allow_redirects=False
            ) as response:
                body = await self._read(response)
                if response.status != 200:
                    raise _Refused(
                        f"status {response.status}: {printable(body.decode(errors='replace'))}",
                        is_final=not is_passing(response.status),
                        pause_seconds=retry_after(response.headers.get("Retry-After", "")),
                    )
        except asyncio.TimeoutError as error:
            limit = self.endpoint.request_timeout_seconds
            raise _Refused(f"no answer within {limit} s") from error
        except (self._aiohttp.ClientError, OSError) as error:
            raise _Refused(f"{type(error).__name__}: {error}") from error
        return answer_text(body)

    async def _read(self, response: Any) -> bytes:
        limit, body = self.endpoint.max_response_bytes, b""
        async for chunk in response.content.iter_chunked(CHUNK_BYTES):
            body += chunk
            if len(body) > limit:
                raise _Refused(f"the answer is longer than {limit} bytes", is_final=True)
        return body


def is_passing(status: int) -> bool:
    """Whether a refusal may be over after a while."""
    return status >= 500 or status in RETRIED_STATUSES


def retry_after(header: str) -> float:
    """The seconds that a server asks for; 0 where it gives none, or a date."""
    return float(header) if header.isdecimal() else 0.0


def answer_text(body: bytes) -> str:
    """`choices[0].message.content` of a completion."""
    try:
        content = json.loads(body)["choices"][0]["message"]["content"]
    except (ValueError, RecursionError, LookupError, TypeError) as error:
        raise _Refused(
            f"the answer is no chat completion: {printable(body[:200].decode(errors='replace'))}"
        ) from error
    if not isinstance(content, str):
        raise _Refused(f"the content of the answer is {type(content).__name__}, not text")
    return content

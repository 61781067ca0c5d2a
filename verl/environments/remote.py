"""Environments that are served elsewhere: OpenEnv.

OpenEnv servers speak JSON over a websocket, one environment for each connection. The connection is
served on a thread of its own, so that a server's keep-alive is answered while the model thinks.
"""

import asyncio
import json
import threading
from collections.abc import Coroutine, Mapping
from typing import Any

from verl.environments.base import Action, Environment, InvalidAction, Observation
from verl.utils.import_utils import require

MAX_MESSAGE_BYTES = 64 << 20
POLICY_FAULTS = ("INVALID_JSON", "VALIDATION_ERROR")
"""What an OpenEnv server says of an action that it cannot read."""


class OpenEnvEnvironment(Environment):
    """A session of an OpenEnv server: `openenv:http://host:port`.

    An action is `{action_key: what the model said}`; with `action_format="json"` the model writes
    the whole action as a JSON object. An observation is shown by `observation_key`, or else as
    JSON. `reset_kwargs` are sent with the seed at each reset.
    """

    def __init__(
        self,
        url: str,
        *,
        action_key: str = "message",
        action_format: str = "text",
        observation_key: str | None = None,
        reset_kwargs: Mapping[str, Any] | None = None,
        timeout_seconds: float = 60.0,
    ) -> None:
        if not url.startswith(("http://", "https://", "ws://", "wss://")):
            raise ValueError(f"openenv:{url} needs an address, such as openenv:http://host:8000")
        if action_format not in ("text", "json"):
            raise ValueError(f"action_format is {action_format!r}; it must be text or json")
        self._aiohttp: Any = require("aiohttp")
        self._url = url.replace("http", "ws", 1) if url.startswith("http") else url
        self._action_key = action_key
        self._is_json = action_format == "json"
        self._observation_key = observation_key
        self._reset_kwargs = dict(reset_kwargs or {})
        self._timeout_seconds = timeout_seconds
        self._loop = asyncio.new_event_loop()
        self._session: Any = None
        self._socket: Any = None
        threading.Thread(target=self._loop.run_forever, name="openenv", daemon=True).start()

    def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        self._run(self._connect())
        message = {"type": "reset", "data": {"seed": seed, **self._reset_kwargs}}
        return self._observation(self._run(self._exchange(message)))

    def step(self, action: Action) -> Observation:
        content: Any = {self._action_key: str(action)}
        if self._is_json:
            try:
                content = json.loads(action)
            except ValueError as error:
                raise InvalidAction(f"The action must be a JSON object: {error}") from error
        return self._observation(self._run(self._exchange({"type": "step", "data": content})))

    def close(self) -> None:
        if self._socket is not None:
            self._run(self._disconnect())
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        return future.result(timeout=self._timeout_seconds)

    async def _connect(self) -> None:
        self._session = self._aiohttp.ClientSession()
        self._socket = await self._session.ws_connect(
            f"{self._url.rstrip('/')}/ws", max_msg_size=MAX_MESSAGE_BYTES
        )

    async def _disconnect(self) -> None:
        await self._socket.close()
        await self._session.close()

    async def _exchange(self, message: Mapping[str, Any]) -> dict[str, Any]:
        await self._socket.send_json(message)
        reply = await self._socket.receive_json()
        if reply.get("type") != "error":
            return reply["data"]
        fault = reply.get("data") or {}
        text = f"{fault.get('code')}: {fault.get('message')}"
        if message["type"] == "step" and fault.get("code") in POLICY_FAULTS:
            raise InvalidAction(text[:1000])
        raise ConnectionError(f"the OpenEnv server {self._url} says {text[:1000]}")

    def _observation(self, reply: Mapping[str, Any]) -> Observation:
        shown = reply.get("observation", {})
        if self._observation_key is not None:
            shown = shown[self._observation_key]
        text = shown if isinstance(shown, str) else json.dumps(shown)
        reward = reply.get("reward")
        return Observation(
            text=text,
            reward=None if reward is None else float(reward),
            done=bool(reply.get("done", False)),
        )

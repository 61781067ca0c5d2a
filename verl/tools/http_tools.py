"""Tools of an HTTP server: what `rollout.multi_turn.tool_server: http://host:8080` stands for.

    GET  /tools                                  [{"type": "function", "function": {...}}, ...]
    POST /call     {"name", "arguments": {...}, "session"}
         reply     {"text", "reward"?: 0.0, "metrics"?: {}, "kind"?: reply, refused or timeout}
    POST /release  {"session"}                   {}

A session is one trajectory. The server makes what it keeps for a session at its first call and
drops it at `/release`, which is sent in every exit. HTTP 400, 404, 413 and 422 with `{"error":
text}` are about the call, and the model reads the text; any other status, no reply, or a reply of
another form is a broken world (`InfraFault`). `python -m verl.tools.serve` is such a server. An
address that ends in `/mcp` or `/sse` is a server of the Model Context Protocol instead.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from verl.protocol.trajectory import InfraFault
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.tools.services import RequestRefused, Service
from verl.utils.environment import WentWrong, tool_server_token
from verl.utils.http_json import RequestFailed, request_json
from verl.utils.py_functional import printable

MAX_TOOLS = 128
MAX_SCHEMA_BYTES = 1 << 20
TIMEOUT_SECONDS = 60.0
MAX_PARALLEL = 256
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class NoToolServer(WentWrong, InfraFault):
    """The server of the tools does not answer when the run begins."""


def tools_of_server(
    url: str, *, timeout_seconds: float = TIMEOUT_SECONDS, max_parallel: int = MAX_PARALLEL
) -> list[BaseTool]:
    """Ask the server which tools it has. Blocks; called once, when the run begins."""
    token = tool_server_token()
    try:
        listed = request_json(
            "GET",
            f"{url.rstrip('/')}/tools",
            timeout_seconds=timeout_seconds,
            max_response_bytes=MAX_SCHEMA_BYTES,
            token=token,
        )
    except RequestFailed as error:
        hint = " (its token belongs in VERL_TOOL_SERVER_TOKEN)" if error.status == 401 else ""
        raise NoToolServer(
            f"the tool server {url} does not list its tools: {error}{hint}"
        ) from error
    if not isinstance(listed, list) or not 1 <= len(listed) <= MAX_TOOLS:
        raise ValueError(
            f"GET {url}/tools must reply a list of 1 to {MAX_TOOLS} OpenAI tool schemas; it "
            f"replied {printable(json.dumps(listed), max_characters=200)}"
        )
    service = Service(
        "the tool server",
        url,
        token=token,
        timeout_seconds=timeout_seconds,
        max_parallel=max_parallel,
    )
    tools: dict[str, BaseTool] = {}
    for entry in listed:
        tool = HttpTool({"type": "native", "url": url}, _schema(entry, url), service)
        if tool.name in tools:
            raise ValueError(f"the tool server {url} lists two tools named {tool.name!r}")
        tools[tool.name] = tool
    return list(tools.values())


def _schema(entry: Any, url: str) -> OpenAIFunctionToolSchema:
    try:
        schema = OpenAIFunctionToolSchema.model_validate(entry)
    except ValidationError as error:
        shown = printable(json.dumps(entry), max_characters=200)
        raise ValueError(
            f"the tool server {url} lists what is no tool: {shown}: {error}"
        ) from error
    if not NAME.fullmatch(schema.function.name):
        raise ValueError(
            f"the tool server {url} lists a tool named {printable(schema.function.name)!r}; names "
            "have 1 to 64 letters, digits, '_', '-' and '.'"
        )
    return schema


class HttpTool(BaseTool):
    """One tool of a server; its instances are the server's sessions."""

    def __init__(
        self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema, service: Service
    ) -> None:
        super().__init__({**config, "timeout": service.deadline_seconds}, tool_schema)
        self.service = service
        self._sessions: dict[str, str] = {}
        """The server's session of each instance that has called it."""

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        agent_data = kwargs.get("agent_data")
        # Tools of one server share what it keeps for a trajectory.
        session = instance_id if agent_data is None else str(agent_data.request_id)
        self._sessions[instance_id] = session
        payload = {"name": self.name, "arguments": parameters, "session": session}
        try:
            answer = await self.service.ask("/call", payload, is_repeatable=False)
        except RequestRefused as refusal:
            raise ValueError(str(refusal)) from refusal
        text, reward, metrics = read_reply(answer, f"{self.service.url}/call")
        kind = answer.get("kind", "reply")
        if kind != "reply":  # what the server's tool refused, or did not finish in time
            raise TimeoutError(text) if kind == "timeout" else ValueError(text)
        return ToolResponse(text=text), reward, metrics

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        session = self._sessions.pop(instance_id, None)
        if session is not None:
            await self.service.ask("/release", {"session": session})


def read_reply(answer: Any, where: str) -> tuple[str, float, dict[str, Any]]:
    """Text, reward and metrics of a reply; one of another form is the server's fault."""
    fields = answer if isinstance(answer, Mapping) else {}
    text, reward, metrics = fields.get("text"), fields.get("reward"), fields.get("metrics")
    reward = 0.0 if reward is None else reward
    is_number = isinstance(reward, int | float) and math.isfinite(reward)
    if not isinstance(text, str) or not is_number or not isinstance(metrics or {}, Mapping):
        raise InfraFault(
            f'{where} must reply {{"text": ..., "reward": a number, "metrics": {{...}}}}; it '
            f"replied {printable(json.dumps(answer), max_characters=200)}"
        )
    return text, float(reward), dict(metrics or {})

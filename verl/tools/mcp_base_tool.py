"""`MCPBaseTool`: a tool that lives on an MCP server, as a tool of ours.

The server is handed in by whoever makes the tool (`verl.tools.mcp`). A subclass may override
`_parse_tool_result`, which turns the content of a result into text for the model and metadata for
the metrics. A result that says it is an error is a reply all the same: the model is told. A server
that is lost is an `InfraFault`.
"""

import asyncio
import base64
import binascii
import io
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple, Protocol

from verl.protocol.trajectory import InfraFault
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

DEFAULT_TIMEOUT_SECONDS = 30.0
MAX_TEXT_CHARACTERS = 1_000_000
MAX_IMAGES = 16
MAX_IMAGE_BYTES = 20_000_000


class CallResult(NamedTuple):
    """What a server answered, and on which connection to it."""

    content: Sequence[Any]
    """Parts with a `type`: `text`, `image`, `resource`, ..., as the package `mcp` has them."""
    is_error: bool
    generation: int


class CallsServer(Protocol):
    """What a tool needs of its server."""

    @property
    def generation(self) -> int:
        """The number of the connection; a server that was lost comes back with another."""
        ...

    async def call(
        self, tool: str, arguments: Mapping[str, Any], *, timeout_seconds: float
    ) -> CallResult: ...

    def close(self) -> None: ...


class RateLimit:
    """At most so many calls begin in a second; further ones wait."""

    def __init__(self, calls_per_second: float) -> None:
        self._interval = 1.0 / calls_per_second
        self._next = 0.0

    async def turn(self) -> None:
        now = time.monotonic()
        self._next = max(now, self._next) + self._interval
        await asyncio.sleep(self._next - self._interval - now)


class MCPBaseTool(BaseTool):
    """Calls the tool of its name on its server. `config`: `timeout` (seconds a call), `rate_limit`
    (calls per second over all trajectories), `stateful` (the server keeps state for a trajectory,
    so that one whose server was lost in between is lost too)."""

    allows_parallel_calls = True
    options = ("rate_limit", "stateful")

    def __init__(
        self, config: Mapping[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        super().__init__({"timeout": DEFAULT_TIMEOUT_SECONDS, **config}, tool_schema)
        self.timeout = float(self.config["timeout"])
        self.server: CallsServer | None = None
        self.rate_limit: RateLimit | None = None
        self._generations: dict[str, int] = {}

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        if self.rate_limit is not None:
            await self.rate_limit.turn()
        result = await self._call_server(instance_id, parameters)
        text, metadata = self._parse_tool_result(list(result.content))
        text, images = text[:MAX_TEXT_CHARACTERS], await read_images(result.content)
        if result.is_error and not text.startswith("Error executing tool"):
            text = f"Error executing tool '{self.name}': {text}"
        return ToolResponse(text=text, image=images or None), 0.0, dict(metadata)

    async def _call_server(self, instance_id: str, parameters: dict[str, Any]) -> CallResult:
        if self.server is None:
            raise InfraFault(f"MCP tool {self.name!r} has no server; verl.tools.mcp hands it one")
        # Less than the deadline of the call, so that a lost server is told from a slow one.
        seconds = self.timeout - min(0.5, self.timeout / 10)
        known = self._generations.get(instance_id)
        if self.config.get("stateful") and known not in (None, self.server.generation):
            raise InfraFault(
                f"the MCP server of {self.name!r} was lost, and with it the state of the trajectory"
            )
        result = await self.server.call(self.name, parameters, timeout_seconds=seconds)
        self._generations[instance_id] = result.generation
        return result

    def _parse_tool_result(self, content: list[Any]) -> tuple[str, dict[str, Any]]:
        """The text for the model, and metadata for the metrics."""
        return "\n".join(filter(None, map(part_text, content))), {}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self._generations.pop(instance_id, None)

    def close(self) -> None:
        """Leave the server; the last tool to do so ends the connection."""
        server, self.server = self.server, None
        if server is not None:
            server.close()


def part_text(part: Any) -> str:
    """What a part of a result says in words; images say nothing."""
    if part.type == "text":
        return part.text
    if part.type == "image":
        return ""
    if part.type == "resource":
        contents = part.resource.model_dump(by_alias=True)
        return contents.get("text") or f"[{contents.get('mimeType')}, {contents['uri']}]"
    if part.type == "resource_link":
        return f"[{part.name}: {part.uri}]"
    return f"[{part.type}]"


async def read_images(content: Sequence[Any]) -> list[Any]:
    data = [part.data for part in content if part.type == "image"]
    return await asyncio.to_thread(decode_images, data) if data else []


def decode_images(data: Sequence[str]) -> list[Any]:
    """Images of Pillow; a server that sends something else is broken."""
    if len(data) > MAX_IMAGES or max(map(len, data)) > MAX_IMAGE_BYTES * 4 / 3:
        raise InfraFault(
            f"an MCP result has {len(data)} images, the largest of {max(map(len, data))} characters"
            f"; at most {MAX_IMAGES} of {MAX_IMAGE_BYTES} bytes are taken"
        )
    try:
        pillow = import_module("PIL.Image")
    except ImportError as error:
        raise InfraFault("an MCP tool sent an image, which needs pillow; install it") from error
    images = []
    for one in data:
        try:
            image = pillow.open(io.BytesIO(base64.b64decode(one, validate=True)))
            image.load()
        except (binascii.Error, OSError, ValueError, pillow.DecompressionBombError) as error:
            raise InfraFault(f"an MCP tool sent an image that cannot be read: {error}") from error
        images.append(image)
    return images

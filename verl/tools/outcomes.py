"""How a call of a tool ended, and what the texts, rewards and exceptions of tools mean.

One of four ways. `reply`: the tool answered. `refused`: the policy's call was at fault (unknown
name, arguments that are no JSON, an exception of the tool); the model is told. `timeout`: no answer
before the deadline, which the policy may have caused too; the model is told. `infra`: the world is
broken, or the tool returned what is no result; the agent loop raises `InfraFault`, because no
reward must be made of that trajectory.
"""

import asyncio
import base64
import errno
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.error import HTTPError, URLError

from verl.protocol.trajectory import InfraFault
from verl.tools.schemas import ToolResponse
from verl.utils.images import BadImage, as_png, open_image

OutcomeKind = Literal["reply", "refused", "timeout", "infra"]
MAX_METRIC_CHARS = 1_000
MAX_REWARD = 3.4028234663852886e38
"""The largest float32, the type of rewards."""
TRUNCATE_SIDES = ("left", "middle", "right")
BROKEN_WORLD = {
    "requests.exceptions.ConnectionError",
    "urllib3.exceptions.HTTPError",
    "aiohttp.client_exceptions.ClientConnectionError",
    "httpx.NetworkError",
    "httpx.ConnectTimeout",
    "httpx.PoolTimeout",
    "httpx.RemoteProtocolError",
    "httpx2.NetworkError",
    "httpx2.ConnectTimeout",
    "httpx2.PoolTimeout",
    "httpx2.RemoteProtocolError",
    "mcp.shared.exceptions.ConnectionClosed",
}
TIMED_OUT = {
    "requests.exceptions.ReadTimeout",
    "httpx.TimeoutException",
    "httpx2.TimeoutException",
    "aiohttp.client_exceptions.ServerTimeoutError",
}
NO_RESOURCES = {errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.ENOMEM, errno.EAGAIN}
NO_NETWORK = {errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EHOSTDOWN}


@dataclass(frozen=True, kw_only=True)
class ToolOutcome:
    """How one call ended."""

    kind: OutcomeKind
    tool: str
    response: ToolResponse
    """What the model is told; for `infra`, what is reported instead."""
    reward: float = 0.0
    """The tool's own reward for the call; only replies have one."""
    metrics: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON data; images become files in base64, without loss."""
        if self.response.video:
            raise ValueError(
                f"the reply of tool {self.tool!r} holds a video; models get images only: let the "
                "tool reply with its frames"
            )
        images = [image_text(image, self.tool) for image in self.response.image or ()]
        return {
            "kind": self.kind,
            "tool": self.tool,
            "text": self.response.text,
            **({"images": images} if images else {}),
            "reward": self.reward,
            "metrics": self.metrics,
            "seconds": self.seconds,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ToolOutcome":
        rest = {name: value for name, value in values.items() if name not in ("text", "images")}
        images = [open_image(base64.b64decode(image)) for image in values.get("images", ())]
        return cls(response=ToolResponse(text=values["text"], image=images or None), **rest)


def image_text(image: Any, tool: str) -> str:
    """An image that a tool replied with, as a file in base64."""
    try:
        opened = open_image(image)
    except BadImage as error:
        raise InfraFault(f"a reply of tool {tool!r}: {error}", reason=tool) from error
    return base64.b64encode(as_png(opened)).decode("ascii")


class BadResult(InfraFault):
    """A tool returned what is no result: a fault of the tool, whatever the policy did."""


def kind_of(error: BaseException) -> OutcomeKind:
    """Whether an exception of a tool is a broken world, a time-out, or something else."""
    names = {f"{one.__module__}.{one.__qualname__}" for one in type(error).__mro__}
    if isinstance(error, InfraFault | ConnectionError) or names & BROKEN_WORLD:
        return "infra"
    if isinstance(error, TimeoutError | asyncio.TimeoutError) or names & TIMED_OUT:
        return "timeout"
    if isinstance(error, HTTPError):
        return "infra" if error.code >= 500 else "refused"
    if isinstance(error, URLError):
        return "infra"
    if isinstance(error, OSError) and error.errno in NO_RESOURCES | NO_NETWORK:
        return "infra"
    return "refused"


def checked_result(name: str, result: Any) -> tuple[ToolResponse, float, dict[str, Any]]:
    """(response, reward, metrics) as `execute` must return it."""
    if not isinstance(result, tuple) or len(result) != 3:
        raise BadResult(
            f"tool {name!r} returned {result!r:.200}; "
            "execute returns (ToolResponse, reward, metrics)"
        )
    response, reward, metrics = result
    if isinstance(response, str):
        response = ToolResponse(text=response)
    if not isinstance(response, ToolResponse):
        kind = type(response).__name__
        raise BadResult(f"tool {name!r} returned a response of type {kind}; return a ToolResponse")
    if response.text is not None and not isinstance(response.text, str):
        kind = type(response.text).__name__
        raise BadResult(f"tool {name!r} returned text of type {kind}; text is str")
    if not is_reward(reward):
        raise BadResult(f"tool {name!r} returned the reward {reward!r:.200}; it must be finite")
    if not isinstance(metrics, Mapping | None):
        raise BadResult(f"tool {name!r} returned metrics {metrics!r:.200}; they must be a dict")
    return (
        response,
        float(reward),
        {str(key): plain(value) for key, value in (metrics or {}).items()},
    )


def is_reward(value: Any) -> bool:
    try:
        return value is not None and not isinstance(value, str) and abs(float(value)) <= MAX_REWARD
    except (TypeError, ValueError, OverflowError):
        return False


def plain(value: Any) -> Any:
    """A metric as JSON data: numbers, text and small data as they are, the rest as short text."""
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return repr(value)[:MAX_METRIC_CHARS]
    return json.loads(text) if len(text) <= MAX_METRIC_CHARS else text[:MAX_METRIC_CHARS]


def truncated(text: str, limit: int, side: str) -> str:
    """The text, or `limit` characters of it with a mark where `side` was cut away."""
    if len(text) <= limit:
        return text
    if side == "left":
        return "(truncated)..." + text[len(text) - limit :]
    if side == "right":
        return text[:limit] + "...(truncated)"
    half = limit // 2
    return text[:half] + "...(truncated)..." + text[len(text) - half :]

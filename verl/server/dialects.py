"""The APIs that the gateway speaks, each as a translation to and from a chat completion."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl.server import messages, responses
from verl.server.answers import ChatCompletion
from verl.server.chat import chunks_of
from verl.server.errors import ApiError
from verl.server.schemas import ChatRequest

Remembered = dict[str, list[dict[str, Any]]]


@dataclass(frozen=True, kw_only=True)
class Call:
    """A request as chat, and what its answer needs beside."""

    chat: dict[str, Any]
    given: Mapping[str, Any] = field(default_factory=dict)
    remembered: Remembered | None = None


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """One API."""

    read: Callable[[dict[str, Any], Remembered], Call]
    whole: Callable[[Call, ChatCompletion], str]
    events: Callable[[Call, ChatCompletion, ChatRequest], Sequence[Any]]
    error: Callable[[ApiError], dict[str, Any]]
    has_named_events: bool = True

"""The APIs that the gateway speaks: each is a translation to a chat request, and back."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl.server.answers import ChatCompletion
from verl.server.chat import chunks_of
from verl.server.errors import ApiError
from verl.server.schemas import ChatRequest

Remembered = dict[str, list[dict[str, Any]]]
"""Conversations of a session, by the id of the answer that they end with."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """A request as chat, and what its answer needs beside."""

    chat: dict[str, Any]
    body: Mapping[str, Any] = field(default_factory=dict)
    remembered: Remembered = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """One API."""

    read: Callable[[dict[str, Any], Remembered], Call]
    whole: Callable[[Call, ChatCompletion], str]
    events: Callable[[Call, ChatCompletion, ChatRequest], Sequence[Any]]
    error: Callable[[ApiError], dict[str, Any]]
    has_named_events: bool = True


CHAT = Dialect(
    read=lambda body, remembered: Call(chat=body),
    whole=lambda call, completion: completion.model_dump_json(),
    events=lambda call, completion, request: chunks_of(
        completion, reports_usage=request.reports_usage
    ),
    error=lambda error: error.body(),
    has_named_events=False,
)


def checked_list(value: Any, name: str) -> list[dict[str, Any]]:
    """A list of objects, or the error of the field."""
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        message = f"{name} must be a list of objects"
        raise ApiError(400, message, param=name, code="invalid_value")
    return value


def texts_of(content: Any, kinds: Sequence[str], name: str) -> str:
    """The text of a content that is a text, or parts of these kinds."""
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for part in checked_list(content, name):
        if part.get("type") not in kinds or not isinstance(part.get("text"), str):
            message = f"{name} has a part of type {str(part.get('type'))[:64]!r}; known: " + (
                ", ".join(kinds)
            )
            raise ApiError(400, message, param=name, code="invalid_value")
        texts.append(part["text"])
    return "\n".join(texts)

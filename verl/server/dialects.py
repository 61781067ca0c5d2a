"""The APIs that the gateway speaks: each is a translation to a chat request, and back."""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from verl.server.answers import ChatChunk, ChatCompletion
from verl.server.errors import ApiError

Remembered = dict[str, list[dict[str, Any]]]
"""Conversations of a session, by the id of the answer that they end with."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """A request as chat, and what its answer needs beside."""

    chat: dict[str, Any]
    body: Mapping[str, Any] = field(default_factory=dict)
    remembered: Remembered = field(default_factory=dict)


class Growing(Protocol):
    """An answer as it is made."""

    def chunks(self) -> AsyncGenerator[ChatChunk, None]: ...

    def completion(self) -> ChatCompletion:
        """What has come so far; after the first chunk."""
        ...


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """One API."""

    read: Callable[[dict[str, Any], Remembered], Call]
    whole: Callable[[Call, ChatCompletion], str]
    events: Callable[[Call, Growing], AsyncGenerator[Any, None]]
    """What a stream consists of."""

    error: Callable[[ApiError], dict[str, Any]]
    has_named_events: bool = True


CHAT = Dialect(
    read=lambda body, remembered: Call(chat=body),
    whole=lambda call, completion: completion.model_dump_json(),
    events=lambda call, growing: growing.chunks(),
    error=lambda error: error.body(),
    has_named_events=False,
)


async def text_pieces(growing: Growing) -> AsyncGenerator[str, None]:
    """The text of the only choice as it comes, after an empty piece for its beginning.

    Blank text waits for words: before a call it is left out of the message.
    """
    held, has_begun, has_words = "", False, False
    async with aclosing(growing.chunks()) as chunks:
        async for chunk in chunks:
            if not has_begun:
                has_begun = True
                yield ""
            held += "".join(choice.delta.content or "" for choice in chunk.choices)
            has_words = has_words or bool(held.strip())
            if has_words and held:
                yield held
                held = ""
    if held and not growing.completion().choices[0].message.tool_calls:
        yield held


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

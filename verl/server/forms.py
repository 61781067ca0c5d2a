"""Requests of agent programs in the form that the server takes.

The server refuses what it cannot do. A program that was written for another model's API cannot be
asked to leave such things out, so the gateway does, and names them in a header of the answer.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from verl.server.errors import ApiError
from verl.server.schemas import MAX_NEW_TOKENS, ChatRequest, parsed

IGNORED_HEADER = "x-verl-ignored"
KEPT = {
    "messages", "tools", "n", "stop", "stream", "stream_options", "logprobs", "return_token_ids",
    "max_tokens", "max_completion_tokens",
}  # fmt: skip
WITHOUT_EFFECT = {
    "model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "modalities", "verbosity",
}  # fmt: skip
"""Fields of which an answer of ours does not depend; they need no mention."""

SAMPLING = {
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty",
    "presence_penalty", "logit_bias", "seed", "ignore_eos", "stop_token_ids", "top_logprobs",
}  # fmt: skip
"""Decided by the configuration of the training."""

NOT_POSSIBLE = {
    "tool_choice", "parallel_tool_calls", "response_format", "reasoning_effort", "prediction",
}  # fmt: skip
"""Wishes that a model under training is free not to fulfil."""

FIELDS = {
    "system": ("content",),
    "developer": ("content",),
    "user": ("content",),
    "assistant": ("content", "tool_calls"),
    "tool": ("content", "tool_call_id"),
}


def chat_form(body: Mapping[str, Any], model: str) -> tuple[ChatRequest, list[str]]:
    """A chat request and the names of its fields that were left out."""
    stated = {name: value for name, value in body.items() if value is not None}
    unknown = sorted(stated.keys() - KEPT - WITHOUT_EFFECT - SAMPLING - NOT_POSSIBLE)
    if unknown:
        known = ", ".join(sorted(KEPT))
        message = f"unknown fields {', '.join(unknown)[:200]}; the gateway takes {known}"
        raise ApiError(400, message, param=unknown[0][:64], code="invalid_value")
    form: dict[str, Any] = {name: stated[name] for name in sorted(KEPT & stated.keys())}
    ignored = sorted((SAMPLING | NOT_POSSIBLE) & stated.keys())
    if stated.get("tool_choice") in ("auto", "none"):
        form["tool_choice"] = stated["tool_choice"]
        ignored.remove("tool_choice")
    for name in ("max_tokens", "max_completion_tokens"):
        if isinstance(form.get(name), int):
            form[name] = min(form[name], MAX_NEW_TOKENS)
    if not form.get("tools"):
        form.pop("tools", None)
    if isinstance(form.get("stream_options"), Mapping):
        options = form["stream_options"]
        form["stream_options"] = {"include_usage": bool(options.get("include_usage"))}
    if isinstance(form.get("messages"), list):
        form["messages"] = [plain_message(message) for message in form["messages"]]
    return parsed(ChatRequest, json.dumps({**form, "model": model}).encode()), ignored


def plain_message(message: Any) -> Any:
    """A message with the fields that count; what is no message is left to the schema."""
    if not isinstance(message, Mapping) or message.get("role") not in FIELDS:
        return message
    role = message["role"]
    plain = {name: message[name] for name in FIELDS[role] if message.get(name) is not None}
    plain["role"] = role
    content = plain.get("content")
    if isinstance(content, list):
        plain["content"] = [plain_part(part) for part in content]
    if content is None or content == []:
        plain.pop("content", None)
        if role != "assistant":
            plain["content"] = ""
    calls = plain.pop("tool_calls", None)
    if isinstance(calls, list) and calls:
        plain["tool_calls"] = [plain_call(call) for call in calls]
    return plain


def plain_part(part: Any) -> Any:
    is_text = isinstance(part, Mapping) and part.get("type") == "text"
    return {"type": "text", "text": part.get("text")} if is_text else part


def plain_call(call: Any) -> Any:
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        return call
    function = call["function"]
    return {
        "id": call.get("id"),
        "type": "function",
        "function": {"name": function.get("name"), "arguments": function.get("arguments")},
    }


def check_tool_replies(messages: Sequence[Any]) -> None:
    """A tool's reply must answer a call of the turn before; else it is nobody's."""
    open_calls: set[str] = set()
    for number, message in enumerate(messages):
        if message.role == "assistant":
            open_calls = {call.id for call in message.tool_calls or ()}
        elif message.role == "tool" and message.tool_call_id not in open_calls:
            raise ApiError(
                400,
                f"messages.{number} replies to the call {message.tool_call_id[:64]!r}, which the "
                "assistant's turn before it has not made",
                param=f"messages.{number}.tool_call_id",
                code="unknown_tool_call",
            )

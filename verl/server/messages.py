"""Anthropic's messages, as a translation of chat completions.

    text, tool_use and tool_result blocks <--> content, tool_calls and messages of the role tool

Blocks of thinking that come back are dropped; images and documents are refused.
"""

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from pydantic_core import from_json

from verl.server.answers import ChatCompletion
from verl.server.dialects import (
    Call,
    Dialect,
    Growing,
    Remembered,
    checked_list,
    text_pieces,
    texts_of,
)
from verl.server.errors import ApiError

IGNORED = {
    "metadata",
    "thinking",
    "service_tier",
    "container",
    "context_management",
    "output_config",
}
TAKEN = {
    "model", "messages", "system", "tools", "tool_choice", "max_tokens", "stop_sequences", "stream",
    "temperature", "top_p", "top_k",
}  # fmt: skip
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
ERROR_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
    404: "not_found_error", 410: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip


def read(body: dict[str, Any], remembered: Remembered) -> Call:
    unknown = sorted(body.keys() - TAKEN - IGNORED)
    if unknown:
        message = f"unknown fields {', '.join(unknown)[:200]}"
        raise ApiError(400, message, param=unknown[0][:64], code="invalid_value")
    system = texts_of(body.get("system"), ["text"], "system")
    messages = [{"role": "system", "content": system}] if system else []
    for number, message in enumerate(checked_list(body.get("messages"), "messages")):
        messages += chat_messages(message, f"messages.{number}.content")
    chat: dict[str, Any] = {
        "messages": messages,
        "max_tokens": body.get("max_tokens"),
        "stop": body.get("stop_sequences") or None,
        "stream": body.get("stream"),
        **{name: body[name] for name in ("temperature", "top_p", "top_k") if name in body},
    }
    if body.get("tools"):
        chat["tools"] = [chat_tool(tool) for tool in checked_list(body["tools"], "tools")]
    choice = body.get("tool_choice")
    if isinstance(choice, Mapping) and choice.get("type") != "auto":
        chat["tool_choice"] = "none" if choice.get("type") == "none" else "required"
    return Call(chat=chat, body=body)


def chat_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("input_schema"),
    }
    stated = {name: value for name, value in function.items() if value is not None}
    return {"type": "function", "function": stated}


def chat_messages(message: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """What one message is in chat: replies of tools are messages of their own."""
    role, content = message.get("role"), message.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    blocks = [
        block
        for block in checked_list(content, name)
        if block.get("type") not in ("thinking", "redacted_thinking")
    ]
    replies, calls, others = [], [], []
    for number, block in enumerate(blocks):
        if block.get("type") == "tool_result":
            text = texts_of(block.get("content"), ["text"], f"{name}.{number}.content")
            call = block.get("tool_use_id")
            replies.append({"role": "tool", "tool_call_id": call, "content": text})
        elif block.get("type") == "tool_use":
            arguments = json.dumps(block.get("input"), ensure_ascii=False)
            function = {"name": block.get("name"), "arguments": arguments}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        else:
            others.append(block)
    text = texts_of(others, ["text"], name)
    if role == "assistant":
        return [{"role": role, "content": text or None, "tool_calls": calls or None}]
    return [*replies, *([{"role": role, "content": text}] if others or not replies else [])]


def answer(call: Call, completion: ChatCompletion) -> dict[str, Any]:
    choice = completion.choices[0]
    content: list[dict[str, Any]] = []
    if choice.message.content:
        content.append({"type": "text", "text": choice.message.content})
    for made in choice.message.tool_calls or ():
        arguments = from_json(made.function.arguments)
        content.append(
            {"type": "tool_use", "id": made.id, "name": made.function.name, "input": arguments}
        )
    return {
        "id": completion.id.replace("chatcmpl-", "msg_"),
        "type": "message",
        "role": "assistant",
        "model": str(call.body.get("model", completion.model)),
        "content": content,
        "stop_reason": STOP_REASONS.get(choice.finish_reason, "end_turn"),
        "stop_sequence": None,
        "usage": {
            "input_tokens": completion.usage.prompt_tokens,
            "output_tokens": completion.usage.completion_tokens,
        },
    }


async def events(call: Call, growing: Growing) -> AsyncGenerator[dict[str, Any], None]:
    """Text as it comes in the first block; calls, which come whole, in blocks after it."""
    has_text = False
    async with aclosing(text_pieces(growing)) as pieces:
        async for text in pieces:
            if not text:
                start = answer(call, growing.completion())
                usage = {**start["usage"], "output_tokens": 0}
                message = {**start, "content": [], "stop_reason": None, "usage": usage}
                yield {"type": "message_start", "message": message}
                continue
            if not has_text:
                has_text = True
                yield block_start(0, {"type": "text", "text": ""})
            yield block_delta(0, {"type": "text_delta", "text": text})
    message = answer(call, growing.completion())
    for index, block in enumerate(message["content"]):
        if block["type"] == "tool_use":
            yield block_start(index, {**block, "input": {}})
            arguments = json.dumps(block["input"], ensure_ascii=False)
            yield block_delta(index, {"type": "input_json_delta", "partial_json": arguments})
        yield {"type": "content_block_stop", "index": index}
    end = {"stop_reason": message["stop_reason"], "stop_sequence": None}
    yield {"type": "message_delta", "delta": end, "usage": message["usage"]}
    yield {"type": "message_stop"}


def block_start(index: int, block: dict[str, Any]) -> dict[str, Any]:
    return {"type": "content_block_start", "index": index, "content_block": block}


def block_delta(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": index, "delta": delta}


def error_answer(error: ApiError) -> dict[str, Any]:
    kind = ERROR_TYPES.get(error.status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


MESSAGES = Dialect(
    read=read,
    whole=lambda call, completion: json.dumps(answer(call, completion), ensure_ascii=False),
    events=events,
    error=error_answer,
)

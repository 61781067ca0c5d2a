"""OpenAI's responses, as a translation of chat completions.

    items: message, function_call, function_call_output <--> messages with their calls and replies

An assistant's message and the calls that follow it are one turn. `previous_response_id` goes on
from an answer of the same session. Items of reasoning that come back are dropped.
"""

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

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
    "metadata", "store", "include", "reasoning", "text", "truncation", "user", "service_tier",
    "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "background", "model",
    "stream_options", "max_tool_calls", "context_management", "conversation",
}  # fmt: skip
TAKEN = {"input", "instructions", "tools", "previous_response_id", "max_output_tokens", "stream"}
SAME = {"temperature", "top_p", "top_logprobs", "tool_choice", "parallel_tool_calls"}
PARTS = ("input_text", "output_text", "text")
MAX_REMEMBERED = 1000


def read(body: dict[str, Any], remembered: Remembered) -> Call:
    stated = {name: value for name, value in body.items() if value is not None}
    unknown = sorted(stated.keys() - TAKEN - IGNORED - SAME)
    if unknown:
        message = f"unknown fields {', '.join(unknown)[:200]}"
        raise ApiError(400, message, param=unknown[0][:64], code="invalid_value")
    messages: list[dict[str, Any]] = []
    if "previous_response_id" in stated:
        previous = stated["previous_response_id"]
        if previous not in remembered:
            message = "previous_response_id names no response of this session"
            raise ApiError(404, message, param="previous_response_id", code="unknown_response")
        messages += remembered[previous]
    given = stated.get("input", "")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    messages += chat_messages(checked_list(items, "input"))
    chat = {
        "messages": messages,
        "max_tokens": stated.get("max_output_tokens"),
        "stream": stated.get("stream"),
        **{name: stated[name] for name in SAME & stated.keys()},
    }
    if "instructions" in stated:  # of this request only: they are not remembered
        chat["messages"] = [{"role": "system", "content": stated["instructions"]}, *messages]
    if stated.get("tools"):
        chat["tools"] = [chat_tool(tool) for tool in checked_list(stated["tools"], "tools")]
    return Call(chat=chat, body={**body, "messages": messages}, remembered=remembered)


def chat_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    known = ("name", "description", "parameters", "strict")
    function = {name: tool[name] for name in known if tool.get(name) is not None}
    return {"type": tool.get("type"), "function": function}


def chat_messages(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    is_open = False  # whether the last message is a turn of the assistant that may get more
    for number, item in enumerate(items):
        kind = item.get("type", "message")
        if kind == "reasoning":
            continue
        if kind == "function_call":
            if not is_open:
                messages.append({"role": "assistant", "content": None})
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            made = {"id": item.get("call_id"), "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(made)
            is_open = True
        elif kind == "function_call_output":
            text = texts_of(item.get("output"), PARTS, f"input.{number}.output")
            call = item.get("call_id")
            messages.append({"role": "tool", "tool_call_id": call, "content": text})
            is_open = False
        elif kind == "message":
            text = texts_of(item.get("content"), PARTS, f"input.{number}.content")
            messages.append({"role": item.get("role"), "content": text})
            is_open = item.get("role") == "assistant"
        else:
            message = f"input.{number} is of type {str(kind)[:64]!r}; known: message, " + (
                "function_call, function_call_output, reasoning"
            )
            raise ApiError(400, message, param=f"input.{number}.type", code="invalid_value")
    return messages


def answer(call: Call, completion: ChatCompletion) -> dict[str, Any]:
    choice, name = completion.choices[0], completion.id.removeprefix("chatcmpl-")
    message = choice.message
    output: list[dict[str, Any]] = []
    if message.content or not message.tool_calls:
        part = {"type": "output_text", "text": message.content or "", "annotations": []}
        output.append(
            {
                "id": f"msg_{name}",
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [part],
            }
        )
    for made in message.tool_calls or ():
        function = {"name": made.function.name, "arguments": made.function.arguments}
        output.append(
            {
                "id": f"fc_{made.id}",
                "type": "function_call",
                "call_id": made.id,
                "status": "completed",
                **function,
            }
        )
    is_cut = choice.finish_reason == "length"
    usage, body = completion.usage, call.body
    return {
        "id": f"resp_{name}",
        "object": "response",
        "created_at": completion.created,
        "model": str(body.get("model", completion.model)),
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "error": None,
        "instructions": body.get("instructions"),
        "metadata": body.get("metadata") or {},
        "output": output,
        "parallel_tool_calls": True,
        "previous_response_id": body.get("previous_response_id"),
        "temperature": None,
        "top_p": None,
        "tool_choice": "auto",
        "tools": body.get("tools") or [],
        "usage": {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.total_tokens,
        },
    }


def remembered_answer(call: Call, completion: ChatCompletion) -> dict[str, Any]:
    """The answer, which `previous_response_id` may name from now on."""
    response, message = answer(call, completion), completion.choices[0].message
    said: dict[str, Any] = {"role": "assistant", "content": message.content}
    if message.tool_calls:
        said["tool_calls"] = [made.model_dump() for made in message.tool_calls]
    call.remembered[response["id"]] = [*call.body["messages"], said]
    if len(call.remembered) > MAX_REMEMBERED:
        del call.remembered[next(iter(call.remembered))]
    return response


async def events(call: Call, growing: Growing) -> AsyncGenerator[dict[str, Any], None]:
    number = 0
    async with aclosing(unnumbered_events(call, growing)) as found:
        async for event in found:
            yield {**event, "sequence_number": number}
            number += 1


async def unnumbered_events(call: Call, growing: Growing) -> AsyncGenerator[dict[str, Any], None]:
    """Text as it comes in the first item; calls, which come whole, in items after it."""
    name, num_pieces = "", 0
    async with aclosing(text_pieces(growing)) as pieces:
        async for text in pieces:
            if not text:
                response = answer(call, growing.completion())
                begun = {**response, "output": [], "status": "in_progress", "usage": None}
                name = response["id"].replace("resp_", "msg_")
                yield {"type": "response.created", "response": begun}
                yield {"type": "response.in_progress", "response": begun}
                continue
            if not num_pieces:
                for event in message_start(name):
                    yield event
            num_pieces += 1
            where = {"item_id": name, "output_index": 0, "content_index": 0}
            yield {
                "type": "response.output_text.delta", "delta": text, "logprobs": [], **where
            }  # fmt: skip
    response = remembered_answer(call, growing.completion())
    for index, item in enumerate(response["output"]):
        if item["type"] == "message" and not num_pieces:  # it has no text
            for event in message_start(name):
                yield event
        for event in item_end(item, index):
            yield event
    yield {"type": f"response.{response['status']}", "response": response}


def message_start(name: str) -> list[dict[str, Any]]:
    item = {"id": name, "type": "message", "role": "assistant", "content": []}
    part = {"type": "output_text", "text": "", "annotations": []}
    where = {"item_id": name, "output_index": 0, "content_index": 0}
    return [
        item_added(0, {**item, "status": "in_progress"}),
        {"type": "response.content_part.added", "part": part, **where},
    ]


def item_added(index: int, item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "response.output_item.added", "output_index": index, "item": item}


def item_end(item: dict[str, Any], index: int) -> list[dict[str, Any]]:
    """What ends a message whose text has been sent, or a whole call."""
    where = {"item_id": item["id"], "output_index": index}
    done = {"type": "response.output_item.done", "output_index": index, "item": item}
    if item["type"] == "message":
        where, part = {**where, "content_index": 0}, item["content"][0]
        text = {"text": part["text"], "logprobs": []}
        return [
            {"type": "response.output_text.done", **text, **where},
            {"type": "response.content_part.done", "part": part, **where},
            done,
        ]
    begun = {**item, "arguments": "", "status": "in_progress"}
    arguments, name = item["arguments"], item["name"]
    kind = "response.function_call_arguments"
    return [
        item_added(index, begun),
        {"type": f"{kind}.delta", "delta": arguments, **where},
        {"type": f"{kind}.done", "arguments": arguments, "name": name, **where},
        done,
    ]


RESPONSES = Dialect(
    read=read,
    whole=lambda call, completion: json.dumps(
        remembered_answer(call, completion), ensure_ascii=False
    ),
    events=events,
    error=lambda error: error.body(),
)

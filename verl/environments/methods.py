"""Classes whose public methods are tools, as TRL's `environment_factory` takes them.

    class Counter:
        def reset(self, **row): self.total = 0
        def add(self, number: int) -> str:
            \"\"\"Add to the total.\"\"\"

Every public method but `reset` and `close` is a tool; type hints and the docstring (Google's
style) are its schema. Where the object has attributes `reward` and `done`, the reward of a turn is
what `reward` has grown by, and the episode ends when `done` is true; a turn without a call ends it
too. Without `reward` a reward function grades the conversation.
"""

import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verl.environments.base import Action, Environment, InvalidAction, Observation, ToolCall

JSON_TYPES: dict[Any, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    dict: "object",
}
_PLAIN: dict[str, Any] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
}
_ARGUMENT = re.compile(r"^\s*(\w+)\s*(?:\([^)]*\))?:\s*(.+)$")
_SECTION = re.compile(r"^\s*(Args|Arguments|Parameters|Returns|Raises|Yields|Example\w*):\s*$")


class ToolMethods(Environment):
    def __init__(self, world: Any) -> None:
        names = [name for name in dir(type(world)) if not name.startswith("_")]
        members = {name: inspect.getattr_static(type(world), name) for name in names}
        self._world = world
        self._methods: dict[str, Callable[..., Any]] = {
            name: getattr(world, name)
            for name, member in members.items()
            if inspect.isfunction(member) and name not in ("reset", "close")
        }
        if not self._methods or "reset" not in members:
            raise TypeError(
                f"{type(world).__name__} is no environment: it has neither reset and step nor "
                "reset and public methods for the model to call"
            )
        self._schemas = {name: schema_of(name, call) for name, call in self._methods.items()}
        self._reward = 0.0

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        return list(self._schemas.values())

    async def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        reset = self._world.reset
        parameters = inspect.signature(reset).parameters.values()
        offered = {**row, "seed": seed}
        if not any(one.kind is one.VAR_KEYWORD for one in parameters):
            offered = {one.name: offered[one.name] for one in parameters if one.name in offered}
        text = await awaited(reset(**offered))
        self._reward = self._total() or 0.0
        return Observation(text=None if text is None else str(text))

    async def step(self, action: Action) -> Observation:
        replies = [await self._call(call) for call in action.tool_calls]
        total = self._total()
        earned = None if total is None else total - self._reward
        self._reward = total or 0.0
        is_done = bool(vars(self._world).get("done", False)) or not replies
        return Observation(messages=replies or None, reward=earned, done=is_done)

    async def close(self) -> None:
        if "close" in dir(type(self._world)):
            await awaited(self._world.close())

    async def _call(self, call: ToolCall) -> dict[str, Any]:
        try:
            result = await awaited(self._method(call)(**call.arguments))
            text = result if isinstance(result, str) else json.dumps(result, default=str)
        except InvalidAction as refusal:
            text = str(refusal)
        return {"role": "tool", "name": call.name, "content": text}

    def _method(self, call: ToolCall) -> Callable[..., Any]:
        if call.error is not None:
            raise InvalidAction(call.error)
        if call.name not in self._methods:
            raise InvalidAction(
                f"Unknown function {call.name!r}. Available tools: {list(self._methods)}"
            )
        parameters = self._schemas[call.name]["function"]["parameters"]
        unknown = sorted(call.arguments.keys() - parameters["properties"].keys())
        missing = sorted(set(parameters["required"]) - call.arguments.keys())
        if unknown or missing:
            raise InvalidAction(
                f"Error executing tool {call.name!r}: unknown arguments {unknown}, missing "
                f"{missing}"
            )
        for name, value in call.arguments.items():
            kind = parameters["properties"][name].get("type")
            if value is None and name not in parameters["required"]:
                continue
            is_wrong_bool = isinstance(value, bool) and kind in ("integer", "number")
            if kind is not None and (is_wrong_bool or not isinstance(value, _PLAIN[kind])):
                raise InvalidAction(
                    f"Error executing tool {call.name!r}: {name} is {value!r:.100}, not {kind}"
                )
        return self._methods[call.name]

    def _total(self) -> float | None:
        reward = vars(self._world).get("reward")
        return None if reward is None else float(reward)


async def awaited(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


def schema_of(name: str, method: Callable[..., Any]) -> dict[str, Any]:
    """OpenAI's description of a method, from its hints and its docstring."""
    hints = typing.get_type_hints(method)
    summary, described = parsed_docstring(inspect.getdoc(method) or "")
    properties: dict[str, Any] = {}
    required: list[str] = []
    for parameter in inspect.signature(method).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise TypeError(f"{name} takes *{parameter.name}; a tool names all its arguments")
        if parameter.name not in hints:
            raise TypeError(f"argument {parameter.name} of {name} has no type hint")
        kind = json_type(hints[parameter.name])
        properties[parameter.name] = {} if kind is None else {"type": kind}
        if parameter.name in described:
            properties[parameter.name]["description"] = described[parameter.name]
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": summary,
            "parameters": {"type": "object", "properties": properties, "required": required},
        },
    }


def json_type(hint: Any) -> str | None:
    """None where JSON has no one type for it."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        choices = [one for one in typing.get_args(hint) if one is not type(None)]
        return json_type(choices[0]) if len(choices) == 1 else None
    return JSON_TYPES.get(typing.get_origin(hint) or hint)


def parsed_docstring(text: str) -> tuple[str, dict[str, str]]:
    """The summary, and the descriptions of arguments."""
    summary: list[str] = []
    described: dict[str, str] = {}
    section = None
    for line in text.splitlines():
        header = _SECTION.match(line)
        if header:
            section = header[1]
        elif section is None:
            summary.append(line.strip())
        elif section in ("Args", "Arguments", "Parameters") and (match := _ARGUMENT.match(line)):
            described[match[1]] = match[2].strip()
    return " ".join(filter(None, summary)), described

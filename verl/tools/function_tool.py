"""`@function_tool`: a plain function as a tool, its schema read from signature and docstring.

    @function_tool
    def add(a: int, b: int = 1) -> str:
        '''Add two numbers.

        Args:
            a: The first number.
            b: The second one.
        '''
        return str(a + b)

A function keeps nothing between calls. It returns text, a `ToolResponse`, data that is shown as
JSON, or a tuple (response, reward, metrics).
"""

import asyncio
import inspect
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints, overload

from pydantic import TypeAdapter

from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.import_utils import load_module

Function = TypeVar("Function", bound=Callable[..., Any])
Schema = OpenAIFunctionToolSchema | Mapping[str, Any]
ToolResult = tuple[ToolResponse, float, dict[str, Any]]

_by_name: dict[str, "FunctionTool"] = {}


@dataclass(frozen=True)
class FunctionTool:
    """A function under the name by which models call it."""

    name: str
    fn: Callable[..., Any]
    tool_schema: OpenAIFunctionToolSchema
    is_async: bool

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return self.tool_schema

    async def call(self, parameters: Mapping[str, Any]) -> ToolResult:
        """Call the function and read what it returns; a blocking one runs in a thread."""
        if self.is_async:
            return normalize_function_tool_return(await self.fn(**parameters))
        return normalize_function_tool_return(await asyncio.to_thread(self.fn, **parameters))


@overload
def function_tool(name: Function, /) -> Function: ...
@overload
def function_tool(
    name: str | None = None, *, schema: Schema | None = None
) -> Callable[[Function], Function]: ...
def function_tool(name: Any = None, *, schema: Schema | None = None) -> Any:
    """Register a function as a tool and return it unchanged.

    `@function_tool`, `@function_tool("name")` or `@function_tool(schema={...})`: the name is that
    of the function or of the schema, the schema is made from signature and docstring.
    """
    if callable(name):
        return _register(name, None, None)
    return lambda fn: _register(fn, name, schema)


def _register(fn: Function, name: str | None, schema: Schema | None) -> Function:
    if schema is None:
        made = schema_of(fn, name or fn.__name__)
    else:
        made = OpenAIFunctionToolSchema.model_validate(
            schema.model_dump() if isinstance(schema, OpenAIFunctionToolSchema) else schema
        )
        _check_parameters(fn, made.function.name)
    name = name or made.function.name
    if made.function.name != name:
        raise ValueError(
            f"the schema of function tool {name!r} names {made.function.name!r}; use one name"
        )
    holder = _by_name.get(name)
    if holder is not None and _origin(holder.fn) != _origin(fn):
        raise ValueError(
            f"function tool {name!r} is already registered as {_origin(holder.fn)}; choose another "
            'name for one of them with @function_tool("name")'
        )
    _by_name[name] = FunctionTool(name, fn, made, inspect.iscoroutinefunction(fn))
    return fn


def _origin(fn: Callable[..., Any]) -> str:
    """Where a function is written; a file that is run again defines the same function again."""
    code = inspect.unwrap(fn).__code__
    return f"{fn.__qualname__} ({code.co_filename}:{code.co_firstlineno})"


def get_function_tool(name: str) -> FunctionTool:
    if name not in _by_name:
        known = ", ".join(sorted(_by_name)) or "none"
        raise ValueError(f"there is no function tool {name!r}; registered: {known}")
    return _by_name[name]


def load_function_tools_from_path(path: str) -> list[FunctionTool]:
    """The function tools of a Python file or of `pkg://package.module`, in the order of the file;
    those that the file imports are among them."""
    module = load_module(path)
    functions = [value for value in vars(module).values() if callable(value)]
    tools = [tool for fn in functions for tool in _by_name.values() if tool.fn is fn]
    if not tools:
        raise ValueError(
            f"{path} defines no tools; decorate its functions with @function_tool "
            "(from verl.tools.function_tool import function_tool)"
        )
    return tools


# ---- what a function returns ---------------------------------------------------------------------


def normalize_function_tool_return(result: Any) -> ToolResult:
    """(response, reward, metrics) of what a function returned.

    A tuple holds up to these three; a dict with no keys but text, image and video is a response;
    other dicts and lists are shown as JSON, anything else as `str` has it.
    """
    if isinstance(result, tuple):
        if not 1 <= len(result) <= 3:
            raise TypeError(
                f"a function tool returned a tuple of {len(result)}; return the response, "
                "(response, reward) or (response, reward, metrics)"
            )
        response, reward, metrics = (*result, None, None)[:3]
        response, _, _ = normalize_function_tool_return(response)
        return response, 0.0 if reward is None else reward, {} if metrics is None else metrics
    if isinstance(result, ToolResponse):
        return result, 0.0, {}
    if isinstance(result, bytes | bytearray):
        raise TypeError("a function tool returned bytes; return text, for example data.decode()")
    if isinstance(result, str):
        return ToolResponse(text=result), 0.0, {}
    if isinstance(result, dict) and result and result.keys() <= {"text", "image", "video"}:
        return ToolResponse(**result), 0.0, {}
    if isinstance(result, dict | list):
        return ToolResponse(text=json.dumps(result, ensure_ascii=False, default=str)), 0.0, {}
    return ToolResponse(text=str(result)), 0.0, {}


# ---- the schema of a function --------------------------------------------------------------------


def schema_of(fn: Callable[..., Any], name: str) -> OpenAIFunctionToolSchema:
    """Types from the annotations (text where there is none), words from the docstring."""
    parameters = _check_parameters(fn, name)
    hints = get_type_hints(fn)
    description, words = read_docstring(inspect.getdoc(fn) or "")
    properties: dict[str, Any] = {}
    definitions: dict[str, Any] = {}
    for one in parameters:
        properties[one.name] = _json_type(hints.get(one.name, str), f"{name}({one.name})")
        definitions |= properties[one.name].pop("$defs", {})
        if words.get(one.name):
            properties[one.name]["description"] = words[one.name]
    required = [one.name for one in parameters if one.default is inspect.Parameter.empty]
    schema: dict[str, Any] = {"type": "object", "properties": properties, "required": required}
    if definitions:
        schema["$defs"] = definitions
    function = {"name": name, "description": description, "parameters": schema}
    return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})


def _check_parameters(fn: Callable[..., Any], name: str) -> list[inspect.Parameter]:
    parameters = list(inspect.signature(fn).parameters.values())
    for one in parameters:
        if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            raise ValueError(
                f"function tool {name!r} takes {one}; a model must be told every parameter by name"
            )
        if one.kind is one.POSITIONAL_ONLY:
            raise ValueError(
                f"function tool {name!r} takes {one.name!r} by position only; models give "
                "arguments by name"
            )
    return parameters


def _json_type(hint: Any, where: str) -> dict[str, Any]:
    if get_origin(hint) in (Union, UnionType):
        others = [one for one in get_args(hint) if one is not NoneType]
        if len(others) == 1:  # Optional: templates show one type
            hint = others[0]
    try:
        return _without_titles(TypeAdapter(hint).json_schema())
    except Exception as error:
        raise ValueError(
            f"{where}: the type {hint!r} has no JSON schema; annotate with JSON types, or give "
            "schema= to function_tool"
        ) from error


def _without_titles(value: Any) -> Any:
    """The schema without the titles that pydantic adds; a property called title stays."""
    if isinstance(value, list):
        return [_without_titles(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {
        key: _without_titles(inner)
        for key, inner in value.items()
        if key != "title" or not isinstance(inner, str)
    }


SECTION = re.compile(
    r"(args|arguments|parameters|params|returns?|raises|yields|examples?|notes?):?"
)
PARAMETERS = ("args", "arguments", "parameters", "params")
ENTRY = re.compile(r"\*{0,2}(\w+)\s?(?:\([^)]*\))?\s?(?::\s?(.*))?")
FIELD = re.compile(r":(?:param|parameter|arg)\s+(?:[^:]*\s)?(\w+):\s?(.*)")


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """What a function does, and what its parameters mean (Google, NumPy and Sphinx forms)."""
    description: list[str] = []
    words: dict[str, list[str]] = {}
    section, entry, indent = "", "", -1
    for line in text.splitlines():
        stripped, depth = line.strip(), len(line) - len(line.lstrip())
        heading = SECTION.fullmatch(stripped.lower())
        field = FIELD.fullmatch(stripped)
        if heading and depth == 0 and (stripped.endswith(":") or heading[1] != stripped):
            section, entry, indent = heading[1], "", -1
        elif field:
            section, entry, indent = "args", field[1], depth
            words[entry] = [field[2]]
        elif stripped.startswith(":") and depth == 0:  # :return: and the like
            section, entry = "returns", ""
        elif stripped and set(stripped) == {"-"}:
            continue
        elif not section:
            description.append(line)
        elif section in PARAMETERS and stripped:
            found = ENTRY.fullmatch(stripped) if indent < 0 or depth <= indent else None
            if found:
                entry, indent = found[1], depth
                is_numpy = depth == 0
                words[entry] = [] if is_numpy or found[2] is None else [found[2]]
            elif entry:
                words[entry].append(stripped)
    return "\n".join(description).strip(), {
        name: " ".join(filter(None, lines)) for name, lines in words.items()
    }

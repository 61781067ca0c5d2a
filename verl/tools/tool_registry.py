"""From a YAML file and a Python file to the tools of a run.

    tools:
      - class_name: my_tools.Calculator
        config: {type: native, scope: trajectory, timeout: 10}
        tool_schema: {type: function, function: {name: calc, description: ..., parameters: ...}}

A field that nobody reads is refused: a misspelt `tool_schema` must not become a tool that the
model is never shown. `config` belongs to the tool, except `type`, `scope` and `timeout`.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import ValidationError

from verl.config.rollout import MultiTurnConfig
from verl.tools.base_tool import BaseTool
from verl.tools.function_tool import FunctionTool, load_function_tools_from_path
from verl.tools.leases import ToolSet
from verl.tools.schemas import OpenAIFunctionToolSchema
from verl.utils.import_utils import load_class_from_fqn
from verl.utils.registry import Registry
from verl.utils.user_files import read_yaml

logger = logging.getLogger(__name__)

ROLLOUT = "actor_rollout_ref.rollout"
MAX_FILE_BYTES = 10_000_000
FIELDS = ("class_name", "config", "tool_schema", "mcp")


class ToolType(Enum):
    """Where the code of a tool is: in a class of ours or the user's, or behind an MCP server."""

    NATIVE = "native"
    MCP = "mcp"


@dataclass(frozen=True, kw_only=True)
class ToolEntry:
    """One item of the file, its fields known and of the right kinds."""

    where: str
    """The file and the number of the entry, for messages."""
    class_name: str
    config: Mapping[str, Any]
    tool_schema: OpenAIFunctionToolSchema | None
    mcp: Mapping[str, Any]

    @property
    def kind(self) -> str:
        return str(self.config.get("type", "native"))

    @cached_property
    def cls(self) -> type[BaseTool]:
        return get_tool_class(self.class_name)


def native_tools(entry: ToolEntry) -> list[BaseTool]:
    if entry.mcp:
        raise ValueError(f"{entry.where} has mcp, which only entries of config.type mcp use")
    return [entry.cls(config=dict(entry.config), tool_schema=entry.tool_schema)]


tool_servers = Registry[Callable[[str], list[BaseTool]]](
    "kind of tool server",
    http="verl.tools.http_tools:tools_of_server",
    mcp="verl.tools.mcp:tools_of_url",
)
tool_types = Registry[Callable[[ToolEntry], list[BaseTool]]](
    "tool type", native=native_tools, mcp="verl.tools.mcp:tools_of_entry"
)


def initialize_tools_from_config(tools_config_file: str) -> list[BaseTool]:
    """The tools that a YAML file lists; one entry of type mcp may stand for several."""
    tools: list[BaseTool] = []
    for entry in read_entries(tools_config_file):
        options = vars(entry.cls).get("options")
        if options is not None:
            known = ("type", "scope", "timeout", *options)
            refuse_unknown(entry.config, known, f"{entry.where}, config")
        tools += tool_types[entry.kind](entry)
    check_names(tools, tools_config_file)
    return tools


def schemas_of_files(
    tool_config_path: str | None = None, function_tool_path: str | None = None
) -> list[dict[str, Any]]:
    """What both files offer to a model, for measuring prompts: no server is asked for its tools."""
    entries = read_entries(tool_config_path) if tool_config_path else []
    functions = load_function_tools_from_path(function_tool_path) if function_tool_path else []
    schemas = [function.tool_schema for function in functions]
    for entry in reversed(entries):
        if entry.tool_schema is not None:
            schemas.insert(0, entry.tool_schema)
        elif entry.kind == "native":
            schemas.insert(0, native_tools(entry)[0].tool_schema)
        else:
            logger.warning(
                "%s: tools of servers do not count in the length of prompts", entry.where
            )
    return [schema.offered() for schema in schemas]


def make_tool_set(turns: MultiTurnConfig, record_folder: str | Path | None = None) -> ToolSet:
    """The tools that `rollout.multi_turn` names, with its limits."""
    tools = load_all_tools(turns.tool_config_path, turns.function_tool_path)
    if turns.tool_server is not None:
        kind = "mcp" if is_mcp_address(turns.tool_server) else "http"
        tools += tool_servers[kind](turns.tool_server)
    check_names(tools, f"{ROLLOUT}.multi_turn")
    if tools and turns.tool_response_truncate_side != "middle":
        logger.info(
            "tool_response_truncate_side=%s: that side of a long reply is cut away, as in verl 0.8 "
            "and later; before, it was the side that was kept",
            turns.tool_response_truncate_side,
        )
    return ToolSet(
        tools,
        max_threads=turns.max_tool_threads,
        default_timeout=turns.tool_timeout_seconds,
        max_response_length=turns.max_tool_response_length,
        truncate_side=turns.tool_response_truncate_side,
        record_folder=record_folder,
    )


def is_mcp_address(url: str) -> bool:
    """Whether `tool_server` speaks the Model Context Protocol, which its last word tells."""
    return urlsplit(url).path.rstrip("/").endswith(("/mcp", "/sse"))


def get_tool_class(cls_name: str) -> type[BaseTool]:
    """The class behind a full name such as `verl.tools.gsm8k_tool.Gsm8kTool`."""
    return load_class_from_fqn(cls_name, "tool")


def load_all_tools(
    tool_config_path: str | None = None, function_tool_path: str | None = None
) -> list[BaseTool | FunctionTool]:
    """The tools of both files; no two may have one name."""
    tools: list[BaseTool | FunctionTool] = []
    if tool_config_path:
        tools += initialize_tools_from_config(tool_config_path)
    if function_tool_path:
        tools += load_function_tools_from_path(function_tool_path)
    check_names(tools, " and ".join(filter(None, (tool_config_path, function_tool_path))))
    return tools


def check_names(tools: "list[BaseTool] | list[BaseTool | FunctionTool]", where: str) -> None:
    seen: set[str] = set()
    for tool in tools:
        if tool.name in seen:
            raise ValueError(
                f"{where}: two tools have the name {tool.name!r}; a call could not tell them apart"
            )
        seen.add(tool.name)


def read_entries(path: str) -> list[ToolEntry]:
    file = Path(path).expanduser()
    if not file.is_file():
        raise FileNotFoundError(f"there is no tool file {path!r} (looked at {file.absolute()})")
    if file.stat().st_size > MAX_FILE_BYTES:
        raise ValueError(f"{path} has more than {MAX_FILE_BYTES} bytes; that is no list of tools")
    content = read_yaml(file)
    if not isinstance(content, dict) or not isinstance(content.get("tools"), list):
        raise ValueError(
            f"{path} must hold `tools:` with a list of {{class_name, config, tool_schema}}"
        )
    refuse_unknown(content, ("tools",), path)
    return [
        read_entry(item, f"{path}, tool {number}")
        for number, item in enumerate(content["tools"], start=1)
    ]


def read_entry(item: Any, where: str) -> ToolEntry:
    if not isinstance(item, dict) or not isinstance(item.get("class_name"), str):
        raise ValueError(f"{where} is {item!r:.200}; it needs class_name, the full name of a class")
    where = f"{where} ({item['class_name']})"
    refuse_unknown(item, FIELDS, where)
    for name in ("config", "mcp", "tool_schema"):
        if not isinstance(item.get(name), dict | None):
            raise ValueError(f"{where}: {name} is {item[name]!r:.200}; it must be a mapping")
    schema = item.get("tool_schema")
    try:
        tool_schema = None if schema is None else OpenAIFunctionToolSchema.model_validate(schema)
    except ValidationError as error:
        raise ValueError(f"{where}: {schema_faults(error)}") from error
    return ToolEntry(
        where=where,
        class_name=item["class_name"],
        config=item.get("config") or {},
        tool_schema=tool_schema,
        mcp=item.get("mcp") or {},
    )


def refuse_unknown(item: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for name in item:
        if name not in known:
            close = get_close_matches(str(name), known, n=1)
            hint = f"; did you mean {close[0]}?" if close else "."
            raise ValueError(
                f"{where} has the field {name!r}, which nobody reads{hint} Known: "
                f"{', '.join(known)}"
            )


def schema_faults(error: ValidationError) -> str:
    """Each fault of a schema: the field and what is wrong with it."""
    lines = []
    for one in error.errors():
        field = ".".join(("tool_schema", *map(str, one["loc"])))
        is_unknown = one["type"] == "extra_forbidden"
        known = (
            "type, function" if len(one["loc"]) == 1 else "name, description, parameters, strict"
        )
        lines.append(
            f"{field} is a field that nobody reads; known: {known}"
            if is_unknown
            else f"{field}: {one['msg']}"
        )
    return "; ".join(lines)

"""Tools of MCP servers, for entries of `config.type: mcp` in the file of tools.

    tools:
      - class_name: verl.tools.mcp_base_tool.MCPBaseTool
        config: {type: mcp, timeout: 30, rate_limit: 120}
        mcp: {mcp_servers_config_path: servers.json, tool_selected_list: [search]}

Servers are connected when the file is read, and stay connected until the last tool of theirs is
closed or the process ends. Entries that name the same server share its connection.
"""

import atexit
import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

from pydantic import ValidationError

from verl.tools.mcp_base_tool import MCPBaseTool, RateLimit
from verl.tools.mcp_spec import ServerSpec, read_server, read_servers
from verl.tools.schemas import OpenAIFunctionToolSchema
from verl.tools.tool_registry import ToolEntry, refuse_unknown
from verl.utils.environment import tool_server_token

FIELDS = ("mcp_servers_config_path", "tool_selected_list")


@dataclass
class Shared:
    """A connected server, and how many tools use it."""

    server: Any
    num_users: int = 0


_lock = threading.Lock()
_servers: dict[tuple[int, str, str], Shared] = {}
_threads: dict[int, Any] = {}
"""By process: a fork has none of its parent's connections."""


def tools_of_entry(entry: ToolEntry) -> "list[MCPBaseTool]":
    """The tools of one entry, on servers that are connected."""
    if not issubclass(entry.cls, MCPBaseTool):
        raise ValueError(
            f"{entry.where}: config.type mcp needs a class that derives from "
            "verl.tools.mcp_base_tool.MCPBaseTool"
        )
    refuse_unknown(entry.mcp, FIELDS, f"{entry.where}, mcp")
    if "mcp_servers_config_path" not in entry.mcp:
        raise ValueError(f"{entry.where}: mcp.mcp_servers_config_path names the file of servers")
    rate = entry.config.get("rate_limit")
    if rate is not None and (
        isinstance(rate, bool) or not isinstance(rate, int | float) or rate <= 0
    ):
        raise ValueError(f"{entry.where}: config.rate_limit is {rate!r}; it is calls per second")
    specs = read_servers(entry.mcp["mcp_servers_config_path"])
    return tools_of_specs(entry, specs, None if rate is None else RateLimit(rate))


def tools_of_url(url: str) -> "list[MCPBaseTool]":
    """All tools of the server that `rollout.multi_turn.tool_server` names."""
    where = "rollout.multi_turn.tool_server"
    token = tool_server_token()
    kind = "sse" if urlsplit(url).path.rstrip("/").endswith("/sse") else "http"
    shown = {"headers": {"Authorization": f"Bearer {token}"}} if token else {}
    entry = ToolEntry(
        where=where,
        class_name=f"{MCPBaseTool.__module__}.{MCPBaseTool.__qualname__}",
        config={"type": "mcp"},
        tool_schema=None,
        mcp={},
    )
    spec = read_server({"url": url, "transport": kind, **shown}, where)
    return tools_of_specs(entry, {"tool_server": spec}, None)


def tools_of_specs(
    entry: ToolEntry, specs: Mapping[str, ServerSpec], limit: RateLimit | None
) -> "list[MCPBaseTool]":
    shared = [connected(name, spec) for name, spec in specs.items()]
    tools: list[MCPBaseTool] = []
    try:
        offered = [(one, tool) for one in shared for tool in one.server.tools]
        for one, tool in selected(offered, entry):
            made = entry.cls(config=dict(entry.config), tool_schema=schema_of(tool, entry.where))
            assert isinstance(made, MCPBaseTool)
            one.num_users += 1
            made.server, made.rate_limit = one.server, limit
            tools.append(made)
    finally:
        for one in shared:
            if not one.num_users:
                close(one)
    return tools


def selected(
    offered: Sequence[tuple[Shared, Mapping[str, Any]]], entry: ToolEntry
) -> Iterator[tuple[Shared, Mapping[str, Any]]]:
    names = [tool["name"] for _, tool in offered]
    wanted = entry.mcp.get("tool_selected_list")
    for name in wanted or ():
        if name not in names:
            close_one = get_close_matches(str(name), names, n=1)
            hint = f"; did you mean {close_one[0]}?" if close_one else "."
            raise ValueError(
                f"{entry.where}: tool_selected_list names {name!r}, which no server has{hint} "
                f"Known: {', '.join(sorted(names))}"
            )
    for one, tool in offered:
        if wanted is None or tool["name"] in wanted:
            yield one, tool


def schema_of(tool: Mapping[str, Any], where: str) -> OpenAIFunctionToolSchema:
    function = {
        "name": tool["name"],
        "description": tool.get("description") or "",
        "parameters": tool["inputSchema"],
    }
    try:
        return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})
    except ValidationError as error:
        raise ValueError(
            f"{where}: the schema of {tool['name']!r} is none a model can be shown: {error}"
        ) from error


# ---- connections of this process -----------------------------------------------------------------


def connected(name: str, spec: ServerSpec) -> Shared:
    """The server, connected now if no other entry has done so."""
    try:
        client = import_module("verl.tools.mcp_client")
    except ModuleNotFoundError as error:
        if error.name not in ("mcp", "anyio"):
            raise
        raise ValueError(
            f'tools of MCP servers need the package {error.name}; pip install "verl[agents]"'
        ) from error
    key = (os.getpid(), name, json.dumps(asdict(spec)))
    with _lock:
        if key not in _servers:
            if os.getpid() not in _threads:
                _threads[os.getpid()] = client.LoopThread()
                atexit.register(close_all, os.getpid())
            server = client.MCPServer(name, spec, _threads[os.getpid()])
            server.start()
            _servers[key] = shared = Shared(server)
            server.on_close = lambda: leave(shared)
        return _servers[key]


def leave(shared: Shared) -> None:
    shared.num_users -= 1
    if shared.num_users <= 0:
        close(shared)


def close(shared: Shared) -> None:
    with _lock:
        keys = [key for key, one in _servers.items() if one is shared]
        for key in keys:
            del _servers[key]
    if keys:
        shared.server.end()


def close_all(pid: int) -> None:
    """At the end of the process that connected; forks of it leave its connections alone."""
    if os.getpid() != pid:
        return
    for key, shared in list(_servers.items()):
        if key[0] == pid:
            close(shared)
    _threads.pop(pid).close()

"""The file that lists MCP servers, `{"mcpServers": {name: {...}}}`, read and checked.

A server is a command, which is started here and ends with the run, or a URL. With `auth_token` the
transport is SSE, as in older files; else it is streamable HTTP unless the path ends in `/sse`.
`transport` says otherwise.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from verl.utils.user_files import read_json

MAX_FILE_BYTES = 10_000_000
START_TIMEOUT_SECONDS = 60.0
TRANSPORTS = {"stdio": "stdio", "sse": "sse", "http": "http", "streamable-http": "http"}
REMOTE = {"url", "auth_token", "headers", "transport", "type", "start_timeout"}
LOCAL = {"command", "args", "env", "cwd", "transport", "type", "start_timeout"}
Transport = Literal["stdio", "sse", "http"]


@dataclass(frozen=True, kw_only=True)
class ServerSpec:
    """How one server is reached."""

    transport: Transport
    url: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    command: str | None = None
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Beside `PATH`, `HOME` and the like; nothing else of our environment is passed on."""
    cwd: str | None = None
    start_timeout_seconds: float = START_TIMEOUT_SECONDS

    @property
    def shown(self) -> str:
        """For messages: without anything secret."""
        if self.command is not None:
            return " ".join([self.command, *self.args])[:200]
        url = urlsplit(self.url or "")
        return f"{url.scheme}://{url.hostname}{f':{url.port}' if url.port else ''}{url.path}"


def read_servers(path: str) -> dict[str, ServerSpec]:
    file = Path(path).expanduser()
    if not file.is_file():
        raise FileNotFoundError(
            f"mcp.mcp_servers_config_path is {path!r}; there is no such file ({file.absolute()})"
        )
    if file.stat().st_size > MAX_FILE_BYTES:
        raise ValueError(f"{path} has more than {MAX_FILE_BYTES} bytes; that is no list of servers")
    content = read_json(file)
    servers = content.get("mcpServers") if isinstance(content, dict) else None
    if not isinstance(servers, dict) or not servers:
        raise ValueError(f'{path} must hold {{"mcpServers": {{name: {{url}} or {{command, args}}}}')
    return {
        name: read_server(fields, f"{path}, server {name!r}") for name, fields in servers.items()
    }


def read_server(fields: Any, where: str) -> ServerSpec:
    if not isinstance(fields, dict) or ("url" in fields) == ("command" in fields):
        raise ValueError(f"{where} needs either url or command")
    known = REMOTE if "url" in fields else LOCAL
    if unknown := sorted(set(fields) - known):
        raise ValueError(f"{where} has {unknown}, which nobody reads; known: {sorted(known)}")
    for name, kind in (("args", list), ("env", dict), ("headers", dict), ("auth_token", str)):
        if not isinstance(fields.get(name, kind()), kind):
            raise ValueError(f"{where}: {name} must be a {kind.__name__}")
    seconds = fields.get("start_timeout", START_TIMEOUT_SECONDS)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or seconds <= 0:
        raise ValueError(
            f"{where}: start_timeout is {seconds!r}; it is a number of seconds above 0"
        )
    transport = stated_transport(fields, where)
    if "command" in fields:
        return ServerSpec(
            transport=transport,
            command=str(fields["command"]),
            args=tuple(map(str, fields.get("args", []))),
            env=texts(fields.get("env", {})),
            cwd=fields.get("cwd"),
            start_timeout_seconds=float(seconds),
        )
    url = urlsplit(str(fields["url"]))
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ValueError(f"{where}: url is {fields['url']!r}; it begins with http:// or https://")
    headers = texts(fields.get("headers", {}))
    if fields.get("auth_token"):
        headers["Authorization"] = f"Bearer {fields['auth_token']}"
    return ServerSpec(
        transport=transport,
        url=fields["url"],
        headers=headers,
        start_timeout_seconds=float(seconds),
    )


def stated_transport(fields: Mapping[str, Any], where: str) -> Transport:
    stated = fields.get("transport", fields.get("type"))
    if stated is None and "command" in fields:
        return "stdio"
    if stated is None:
        is_sse = bool(fields.get("auth_token")) or str(fields["url"]).rstrip("/").endswith("/sse")
        return "sse" if is_sse else "http"
    if stated not in TRANSPORTS or (TRANSPORTS[stated] == "stdio") != ("command" in fields):
        raise ValueError(
            f"{where}: transport is {stated!r}; choose sse or http for a url, stdio for a command"
        )
    return TRANSPORTS[stated]  # pyright: ignore[reportReturnType]


def texts(values: Mapping[str, Any]) -> dict[str, str]:
    return {str(name): str(value) for name, value in values.items()}

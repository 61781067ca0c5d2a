"""Serve tools over HTTP: the reference server of `rollout.multi_turn.tool_server`.

    python -m verl.tools.serve my_tools.py --port 8080
    python -m verl.tools.serve --tool-config tools.yaml --port 8080

The first serves the functions that a file decorates with `@function_tool`, the second the tools of
a YAML file; both may be given. The protocol is in `http_tools`. A session holds a lease: instances
are made at its first call and given back at `/release`, after `--session-seconds` without a call,
and at the end of the server. It listens on 127.0.0.1 and asks for the token in
`VERL_TOOL_SERVER_TOKEN`; without that variable it makes one and prints it.
"""

import argparse
import asyncio
import json
import logging
import sys
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from verl.tools.leases import Tool, ToolLease, ToolSet
from verl.tools.parsers import FunctionCall
from verl.tools.tool_registry import load_all_tools
from verl.utils.environment import tool_server_token
from verl.utils.json_server import JsonServer, Refusal

logger = logging.getLogger(__name__)

MAX_REPLY_CHARACTERS = 1 << 19
MAX_SESSIONS = 4096
MAX_SESSION_CHARACTERS = 256
SESSION_SECONDS = 3600.0
JOIN_SECONDS = 30.0


class ToolService:
    """Leases by session, on an event loop of its own; the routes of the server."""

    def __init__(
        self,
        tools: Sequence[Tool],
        *,
        max_sessions: int = MAX_SESSIONS,
        session_seconds: float = SESSION_SECONDS,
        default_timeout: float = 60.0,
    ) -> None:
        self.tool_set = ToolSet(
            tools, default_timeout=default_timeout, max_response_length=MAX_REPLY_CHARACTERS
        )
        self.max_sessions = max_sessions
        self.session_seconds = session_seconds
        self._leases: dict[str, tuple[ToolLease, float]] = {}
        """The lease of each session, and when it was last used; the oldest use comes first."""
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    @property
    def routes(self) -> dict[tuple[str, str], Any]:
        return {
            ("GET", "/tools"): self.list_tools,
            ("POST", "/call"): self.call,
            ("POST", "/release"): self.release,
        }

    def list_tools(self, _: Any) -> list[dict[str, Any]]:
        return [tool.tool_schema.offered() for tool in self.tool_set.tools.values()]

    def call(self, request: Any) -> dict[str, Any]:
        name, arguments = field(request, "name", str), field(request, "arguments", dict)
        session = session_of(request)
        lease = self._lease(session)
        made = FunctionCall(name=name, arguments=json.dumps(arguments))
        outcome = self._wait(lease.call(made))
        if outcome.kind == "infra":
            raise Refusal(503, outcome.response.text or "the tool is broken")
        if outcome.response.image or outcome.response.video:
            raise Refusal(501, f"tool {name!r} answered with media, which this protocol lacks")
        reply: dict[str, Any] = {"text": outcome.response.text or "", "kind": outcome.kind}
        return reply | {"reward": outcome.reward, "metrics": outcome.metrics}

    def release(self, request: Any) -> dict[str, Any]:
        with self._lock:
            lease, _ = self._leases.pop(session_of(request), (None, 0.0))
        if lease is not None:
            self._wait(lease.release())
        return {}

    def close(self) -> None:
        """Give back every instance and end the threads."""
        self.tool_set.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(JOIN_SECONDS)
        self._loop.close()

    def _lease(self, session: str) -> ToolLease:
        now = time.monotonic()
        with self._lock:
            lease, _ = self._leases.pop(session, (None, 0.0))
            forgotten = []
            for name, (old, used_at) in list(self._leases.items()):
                if now - used_at < self.session_seconds:
                    break
                forgotten.append(old)
                del self._leases[name]
            if lease is None and len(self._leases) >= self.max_sessions:
                raise Refusal(429, f"{self.max_sessions} sessions are open; release some")
            lease = lease or self.tool_set.lease(session)
            self._leases[session] = lease, now
        for old in forgotten:
            logger.warning("session %s was not released; it is given back now", old.owner)
            old.start_release()
        return lease

    def _wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run on the event loop; leases end a call at its tool's deadline, long before this one."""
        longest = max(map(self.tool_set.timeout_of, self.tool_set.tools.values()))
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(3 * longest + JOIN_SECONDS)


def field(request: Any, name: str, kind: type) -> Any:
    value = request.get(name) if isinstance(request, Mapping) else None
    if not isinstance(value, kind):
        raise Refusal(422, f"`{name}` must be a JSON {'object' if kind is dict else 'text'}")
    return value


def session_of(request: Any) -> str:
    session = field(request, "session", str)
    if not 1 <= len(session) <= MAX_SESSION_CHARACTERS:
        raise Refusal(422, f"`session` has 1 to {MAX_SESSION_CHARACTERS} characters")
    return session


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m verl.tools.serve", description="Serve tools over HTTP."
    )
    parser.add_argument("file", nargs="?", help="Python file with @function_tool functions")
    parser.add_argument("--tool-config", help="YAML file of tools")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8080, help="0 takes a free one")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds per call")
    parser.add_argument("--max-sessions", type=int, default=MAX_SESSIONS)
    parser.add_argument("--session-seconds", type=float, default=SESSION_SECONDS)
    options = parser.parse_args(arguments)
    if not (options.file or options.tool_config):
        parser.error("name a Python file, or --tool-config")
    try:
        service = ToolService(
            load_all_tools(options.tool_config, options.file),
            max_sessions=options.max_sessions,
            session_seconds=options.session_seconds,
            default_timeout=options.timeout,
        )
        given = tool_server_token() or None
        server = JsonServer(service.routes, host=options.host, port=options.port, token=given)
    except (OSError, ValueError, RuntimeError) as error:
        sys.exit(f"error: {error}")
    names = ", ".join(service.tool_set.tools)
    shown = "the one in VERL_TOOL_SERVER_TOKEN" if given else server.token
    sys.stdout.write(f"url: {server.url}\ntoken: {shown}\ntools: {names}\n")
    sys.stdout.flush()
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        sys.stdout.write("stopped\n")
    finally:
        service.close()


if __name__ == "__main__":
    main()

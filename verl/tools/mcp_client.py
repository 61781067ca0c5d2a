"""One MCP server, connected for the whole run: the only module that imports the package `mcp`.

    any event loop ---call---> thread of all MCP servers
                                 | one task per connection enters transport and session, and leaves
                                 |   them: anyio demands that one task does both
                                 + one task per call, in the session of the connection

A connection is lost when its stream ends, or when a server does not even answer a ping for as long
as a call may take. Calls on it fail at once as `InfraFault`: whether the server has acted is not
known, so they are not repeated. The next call connects again. Works with mcp 1.x and 2.x, whose
names differ: what they have in common are the names on the wire.
"""

import asyncio
import importlib
import logging
import os
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import anyio
import mcp
from mcp.client import streamable_http
from mcp.client.sse import sse_client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.shared import exceptions
from mcp.shared._httpx_utils import create_mcp_http_client
from pydantic import ValidationError

from verl.protocol.trajectory import InfraFault
from verl.tools.mcp_base_tool import CallResult
from verl.tools.mcp_spec import ServerSpec
from verl.utils.processes import supervised
from verl.utils.timeouts import within

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 64 << 20
"""Longest message that a server may send."""
MAX_TOOLS = 1000
MAX_STDERR_BYTES = 1 << 20
STDERR_TAIL_BYTES = 2000
RECONNECT_TRIES = 3
RECONNECT_SECONDS = 0.5
"""Wait before the second try; it doubles from try to try."""
IDLE_SECONDS = 24 * 3600.0
CLOSE_SECONDS = 8.0
PROBE_SECONDS = 1.0
CONNECTION_CLOSED = -32000
BROKEN = (anyio.ClosedResourceError, anyio.BrokenResourceError, OSError)
Error: type[Exception] = vars(exceptions).get("MCPError") or vars(exceptions)["McpError"]


class ConnectionLost(InfraFault):
    """The server is gone, or does not come back."""


class LoopThread:
    """An event loop on a thread of its own. Stdio servers end when this thread does."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="mcp", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:  # each closes its streams
            task.cancel()
        if tasks:
            self.loop.run_until_complete(asyncio.wait(tasks, timeout=CLOSE_SECONDS / 2))
        self.loop.close()

    def close(self) -> None:
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(CLOSE_SECONDS)


class MCPServer:
    """A server and the connection to it; `call` may be awaited on any event loop."""

    def __init__(self, name: str, spec: ServerSpec, thread: LoopThread) -> None:
        self.name = name
        self.spec = spec
        self.generation = 0
        self.tools: list[dict[str, Any]] = []
        """As the server describes them: `name`, `description`, `inputSchema`."""
        self.on_close: Callable[[], None] = lambda: None
        self._thread = thread
        self._connection: Connection | None = None
        self._connecting: asyncio.Task[Connection] | None = None
        self._probing: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Connect and ask for the tools; blocks. A ValueError says why there is no connection."""
        tries = RECONNECT_TRIES if self.spec.url else 1
        try:
            self._run(self._connect(tries)).result(tries * (self.spec.start_timeout_seconds + 10))
        except ConnectionLost as error:
            raise ValueError(str(error)) from error

    async def call(
        self, tool: str, arguments: Mapping[str, Any], *, timeout_seconds: float
    ) -> CallResult:
        """The server's answer, or TimeoutError, `InfraFault`, or a ValueError for the model."""
        call = self._run(self._call(tool, dict(arguments), timeout_seconds))
        return await asyncio.wrap_future(call)

    def close(self) -> None:
        """For one of its users; the last one ends the connection."""
        self.on_close()

    def end(self) -> None:
        """End the connection; blocks until a stdio server has ended."""
        self._run(self._end()).result(CLOSE_SECONDS)

    def _run(self, work: Any) -> Any:
        try:
            return asyncio.run_coroutine_threadsafe(work, self._thread.loop)
        except RuntimeError as error:
            work.close()
            raise ConnectionLost(f"MCP server {self.name!r}: the run has ended") from error

    # ---- on the thread ---------------------------------------------------------------------------

    async def _call(self, tool: str, arguments: dict[str, Any], seconds: float) -> CallResult:
        deadline = asyncio.get_running_loop().time() + seconds
        for is_last in (False, True):
            connection = await self._connected(deadline)
            try:
                return await connection.call(tool, arguments, deadline)
            except SessionForgotten as error:
                self._retire(connection)
                if is_last:
                    raise ConnectionLost(f"MCP server {self.name!r}: {error}") from error
            except asyncio.TimeoutError:
                if not await connection.is_reachable():
                    self._retire(connection)
                    raise ConnectionLost(
                        f"MCP server {self.name!r} at {self.spec.url} takes no connections"
                    ) from None
                if self._probing is None or self._probing.done():
                    self._probing = asyncio.create_task(self._probe(connection, seconds))
                raise TimeoutError(f"no result within {seconds:g} s") from None
        raise AssertionError("the last try returns or raises")

    async def _probe(self, connection: "Connection", seconds: float) -> None:
        """After a time-out: is it the call that is slow, or the server that hangs?"""
        try:
            await within(connection.ping(), seconds)
        except (TimeoutError, *BROKEN, Error) as error:
            logger.warning("MCP server %r does not answer (%r); connecting anew", self.name, error)
            self._retire(connection)

    async def _connected(self, deadline: float) -> "Connection":
        if self._connection is not None and not self._connection.lost.done():
            return self._connection
        if self._connecting is None or self._connecting.done():
            self._connecting = asyncio.create_task(self._connect(RECONNECT_TRIES))
            self._connecting.add_done_callback(lambda task: task.cancelled() or task.exception())
        left = deadline - asyncio.get_running_loop().time()
        done, _ = await asyncio.wait({self._connecting}, timeout=max(left, 0.0))
        if not done:
            raise ConnectionLost(f"MCP server {self.name!r} was lost and is not back in time")
        return await self._connecting

    async def _connect(self, tries: int) -> "Connection":
        for attempt in range(tries):
            if attempt:
                await asyncio.sleep(RECONNECT_SECONDS * 2 ** (attempt - 1))
            connection = Connection(self.name, self.spec, self.generation + 1)
            try:
                tools = await connection.open()
            except ConnectionLost as error:
                if attempt + 1 == tries:
                    raise
                logger.warning("%s; trying again", error)
                continue
            names = {tool["name"] for tool in tools}
            if gone := {tool["name"] for tool in self.tools} - names:
                connection.retire()
                raise ConnectionLost(f"MCP server {self.name!r} came back without {sorted(gone)}")
            self.generation += 1
            self.tools = tools
            self._connection = connection
            return connection
        raise AssertionError("the last try returns or raises")

    def _retire(self, connection: "Connection") -> None:
        connection.retire()
        if self._connection is connection:
            self._connection = None

    async def _end(self) -> None:
        for task in (self._connecting, self._probing):
            if task is not None:
                task.cancel()
        if self._connection is not None:
            self._connection.retire()
            await self._connection.ended


class SessionForgotten(Exception):
    """An HTTP server that was started anew: it refused the request unread."""


class Connection:
    """A session with a server, and the task that owns it."""

    def __init__(self, name: str, spec: ServerSpec, generation: int) -> None:
        self.generation = generation
        self.lost: asyncio.Future[None] = asyncio.Future()
        self.ended: asyncio.Future[None] = asyncio.Future()
        self._name = name
        self._spec = spec
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._leave: asyncio.Future[None] = asyncio.Future()
        self._session: mcp.ClientSession | None = None
        self._ready: asyncio.Future[list[dict[str, Any]]] = asyncio.Future()
        self._ready.add_done_callback(lambda ready: ready.cancelled() or ready.exception())
        self._owner = asyncio.create_task(self._own())

    async def open(self) -> list[dict[str, Any]]:
        """The tools of the server, once the session is there."""
        try:
            return await within(asyncio.shield(self._ready), self._spec.start_timeout_seconds)
        except TimeoutError:
            self.retire()
            seconds = self._spec.start_timeout_seconds
            raise ConnectionLost(
                f"MCP server {self._name!r} ({self._spec.shown}) did not answer within {seconds:g} "
                f"s{self._stderr_tail()}"
            ) from None

    async def _own(self) -> None:
        """Enter transport and session, stay until told to leave, and leave both."""
        try:
            async with AsyncExitStack() as stack:
                read, write, *_ = await stack.enter_async_context(self._transport())
                sender, receiver = anyio.create_memory_object_stream(0)
                for stream in (read, write, sender, receiver):
                    await stack.enter_async_context(stream)
                group = await stack.enter_async_context(anyio.create_task_group())
                group.start_soon(self._pump, read, sender)
                session = await stack.enter_async_context(mcp.ClientSession(receiver, write))
                await session.initialize()
                self._session = session
                self._ready.set_result(await list_tools(session))
                await self._leave
                settle(self.lost)
                group.cancel_scope.cancel()
        except BaseException as error:
            if not self._ready.done():
                self._ready.set_exception(
                    ConnectionLost(
                        f"no connection to MCP server {self._name!r} ({self._spec.shown}): "
                        f"{causes(error)}{self._stderr_tail()}"
                    )
                )
            elif not self._leave.done():
                logger.warning("MCP server %r was lost: %s", self._name, causes(error))
            if isinstance(error, asyncio.CancelledError):
                raise
        finally:
            settle(self.lost)
            settle(self.ended)
            self._stderr.close()

    async def _pump(self, source: Any, sink: Any) -> None:
        """Pass messages on, and notice the end of the stream."""
        async with source, sink:
            try:
                async for message in source:
                    await sink.send(message)
            finally:
                settle(self.lost)
                settle(self._leave)

    @asynccontextmanager
    async def _transport(self) -> AsyncIterator[Sequence[Any]]:
        spec = self._spec
        if spec.command is not None:
            line = supervised(
                [spec.command, *spec.args],
                max_line_bytes=MAX_MESSAGE_BYTES,
                max_stderr_bytes=MAX_STDERR_BYTES,
            )
            parameters = StdioServerParameters(
                command=line[0], args=line[1:], env=dict(spec.env), cwd=spec.cwd
            )
            async with stdio_client(parameters, errlog=self._stderr) as streams:
                yield streams
            return
        assert spec.url is not None
        if spec.transport == "sse":
            async with sse_client(
                spec.url,
                headers=dict(spec.headers),
                sse_read_timeout=IDLE_SECONDS,
                httpx_client_factory=self._limited_client,
            ) as streams:
                yield streams
            return
        async with (
            self._limited_client(headers=dict(spec.headers)) as client,
            streamable_http.streamable_http_client(spec.url, http_client=client) as streams,
        ):
            yield streams

    def _limited_client(self, headers: Any = None, timeout: Any = None, auth: Any = None) -> Any:
        """A client whose messages are counted before anybody collects or parses them."""
        client = create_mcp_http_client(headers=headers, timeout=timeout, auth=auth)
        client.headers["accept-encoding"] = "identity"  # what is counted is what is parsed
        package = importlib.import_module(type(client).__module__.partition(".")[0])

        def too_long() -> OSError:
            logger.warning(
                "MCP server %r sends a message of more than %d bytes, or a compressed one",
                self._name,
                MAX_MESSAGE_BYTES,
            )
            self.retire()
            return OSError(f"a message has more than {MAX_MESSAGE_BYTES} bytes, or is compressed")

        class Counted(package.AsyncByteStream):
            """Raises when a body, or an event of a stream, is longer than a message may be."""

            def __init__(self, source: Any, is_stream: bool) -> None:
                self.source, self.is_stream = source, is_stream

            async def __aiter__(self) -> AsyncIterator[bytes]:
                num_bytes, tail = 0, b""
                async for part in self.source:
                    whole = tail + part
                    end = max(whole.rfind(b"\n\n"), whole.rfind(b"\r\n\r\n"))
                    is_new = self.is_stream and end >= 0
                    num_bytes = len(whole) - end if is_new else num_bytes + len(part)
                    tail = whole[-3:]
                    if num_bytes > MAX_MESSAGE_BYTES:
                        raise too_long()
                    yield part

            async def aclose(self) -> None:
                await self.source.aclose()

        async def count(response: Any) -> None:
            if response.headers.get("content-encoding", "identity") != "identity":
                raise too_long()
            kind = response.headers.get("content-type", "")
            response.stream = Counted(response.stream, kind.startswith("text/event-stream"))

        client.event_hooks["response"].append(count)
        return client

    def retire(self) -> None:
        """Take no more calls; the owner leaves the session."""
        settle(self.lost)
        settle(self._leave)
        if not self._ready.done():
            self._owner.cancel()

    async def call(self, tool: str, arguments: dict[str, Any], deadline: float) -> CallResult:
        assert self._session is not None
        work = asyncio.create_task(self._session.call_tool(tool, arguments))
        left = max(deadline - asyncio.get_running_loop().time(), 0.0)
        try:
            both = {work, self.lost}
            await asyncio.wait(both, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return await self._result(tool, work)
            if self.lost.done():
                raise self._lost_during(tool)
            raise asyncio.TimeoutError
        finally:
            work.cancel()

    async def _result(self, tool: str, work: "asyncio.Task[Any]") -> CallResult:
        """What a call came to; exceptions of the package get a meaning here."""
        try:
            result = await work
        except Error as error:
            message, is_lost = meaning(error)
            if "Session terminated" in message or "Session not found" in message:
                raise SessionForgotten(message) from error
            if is_lost or self.lost.done():
                raise self._lost_during(tool) from error
            raise ValueError(message) from error
        except BROKEN as error:
            raise self._lost_during(tool) from error
        except ValidationError as error:
            raise InfraFault(
                f"MCP server {self._name!r}: what {tool} returned is no result"
            ) from error
        fields = result.model_dump(by_alias=True, exclude={"content"})
        return CallResult(result.content, bool(fields.get("isError")), self.generation)

    def _lost_during(self, tool: str) -> ConnectionLost:
        self.retire()
        return ConnectionLost(f"MCP server {self._name!r} was lost during a call of {tool}")

    async def ping(self) -> None:
        assert self._session is not None
        await self._session.send_ping()

    async def is_reachable(self) -> bool:
        """Whether somebody listens at the URL; a stdio server whose stream is open is there."""
        if self._spec.url is None:
            return not self.lost.done()
        url = urlsplit(self._spec.url)
        port = url.port or (443 if url.scheme == "https" else 80)
        try:
            _, writer = await within(asyncio.open_connection(url.hostname, port), PROBE_SECONDS)
        except (OSError, TimeoutError):
            return False
        writer.close()
        return True

    def _stderr_tail(self) -> str:
        descriptor = self._stderr.fileno()
        start = max(os.fstat(descriptor).st_size - STDERR_TAIL_BYTES, 0)
        tail = os.pread(descriptor, STDERR_TAIL_BYTES, start).decode(errors="replace").strip()
        return f"\nstderr: {tail}" if tail else ""


def settle(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


async def list_tools(session: mcp.ClientSession) -> list[dict[str, Any]]:
    """All pages of the list."""
    tools: list[dict[str, Any]] = []
    cursor: str | None = None
    while True:
        params = mcp.types.PaginatedRequestParams(cursor=cursor)
        page = await session.list_tools(params=params)
        fields = page.model_dump(by_alias=True, mode="json")
        tools += fields["tools"]
        if len(tools) > MAX_TOOLS:
            raise ValueError(f"the server lists more than {MAX_TOOLS} tools")
        cursor = fields.get("nextCursor")
        if not cursor:
            return tools


def meaning(error: Exception) -> tuple[str, bool]:
    """The text of an error of the protocol, and whether it says that the connection has ended."""
    data = vars(error)["error"].model_dump()
    return data["message"], data["code"] == CONNECTION_CLOSED


def causes(error: BaseException) -> str:
    """What is inside a group of exceptions, in one line."""
    match error:
        case BaseException(exceptions=(_, *_) as inner):
            return "; ".join(map(causes, inner))
    return f"{type(error).__name__}: {error}"

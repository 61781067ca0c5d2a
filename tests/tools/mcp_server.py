"""An MCP server for the tests, of mcp 1.x or 2.x: mcp_server.py [sse|streamable-http PORT]."""

import asyncio
import os
import sys
import time

try:
    from mcp.server.mcpserver import MCPServer as Server
    from mcp.server.mcpserver.exceptions import ToolError
    from mcp_types import ImageContent, TextContent

    IS_NEW = True
except ImportError:
    from mcp.server.fastmcp import FastMCP as Server
    from mcp.server.fastmcp.exceptions import ToolError
    from mcp.types import ImageContent, TextContent

    IS_NEW = False

TRANSPORT, PORT = (*sys.argv[1:], "stdio", "0")[:2]
server = Server("test") if IS_NEW else Server("test", port=int(PORT))
PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAIAAAABCAIAAAB7QOjdAAAAD0lEQVR4nGP4z8DAwPAfAAcAAf9gynZ2AAAAAElFTkSu"
    "QmCC"
)


@server.tool()
def add(a: int, b: int = 1, tags: list[str] | None = None) -> str:
    """Add two numbers."""
    return f"{a + b} {tags or ''}".strip()


@server.tool()
def variable(name: str) -> str:
    """A variable of the environment."""
    return os.environ.get(name, "<unset>")


@server.tool()
def pid() -> str:
    """The process of the server."""
    return str(os.getpid())


@server.tool()
async def wait(seconds: float, mark: str = "") -> str:
    """Wait; then answer. A file named by `mark` says that it has begun."""
    if mark:
        with open(mark, "w") as file:
            file.write(str(os.getpid()))
    await asyncio.sleep(seconds)
    return "done"


@server.tool()
async def block(seconds: float) -> str:
    """Answer nobody for a while."""
    time.sleep(seconds)
    return "done"


@server.tool()
def fail(reason: str) -> str:
    """Fail."""
    raise ToolError(reason)


@server.tool()
def picture() -> list[ImageContent | TextContent]:
    """A picture of two pixels."""
    image = {"type": "image", "data": PIXEL, "mimeType": "image/png"}
    return [ImageContent.model_validate(image), TextContent(type="text", text="two pixels")]


@server.tool()
def long(size: int) -> str:
    """A long text."""
    return "x" * size


if __name__ == "__main__":
    if TRANSPORT == "stdio":
        server.run()
    elif IS_NEW:
        server.run(TRANSPORT, port=int(PORT))
    else:
        server.run(TRANSPORT)

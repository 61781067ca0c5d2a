"""An MCP server that plays guess the number, over standard input and output.

    python examples/guess_number/server.py runs/guess_number/targets.json [--sham]

It has one tool, `guess(n, game)`. `--sham` answers at random: a model that still learns to win does
not learn from the answers.
"""

import argparse
import json
import random
from pathlib import Path

try:  # mcp 2
    from mcp.server import MCPServer
except ImportError:  # mcp 1
    from mcp.server.fastmcp import FastMCP as MCPServer

MAX_GUESSES = 6


def make_server(targets: dict[str, int], is_sham: bool) -> MCPServer:
    server = MCPServer("guess-number", log_level="WARNING")

    @server.tool()
    async def guess(n: int, game: str) -> str:
        """Guess the number."""
        target = targets[game]
        if is_sham:
            return random.choice(["low", "high"])
        return "win" if n == target else "low" if n < target else "high"

    return server


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Serve guess the number over MCP.")
    parser.add_argument("targets", type=Path)
    parser.add_argument("--sham", action="store_true")
    arguments = parser.parse_args()
    make_server(json.loads(arguments.targets.read_text()), arguments.sham).run("stdio")

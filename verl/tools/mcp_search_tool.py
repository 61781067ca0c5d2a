"""`MCPSearchTool`: a search engine behind an MCP server, with its hits counted."""

import json
from typing import Any

from verl.tools.mcp_base_tool import MCPBaseTool

HITS = ("results", "result", "hits", "items", "documents")
"""Where search servers put their hits, the usual name first."""


class MCPSearchTool(MCPBaseTool):
    """Answers as `MCPBaseTool` does; metadata say how many hits there were, where that is known."""

    options = MCPBaseTool.options

    def _parse_tool_result(self, content: list[Any]) -> tuple[str, dict[str, Any]]:
        text, metadata = super()._parse_tool_result(content)
        num_hits = sum(count_hits(part.text) for part in content if part.type == "text")
        return text, {**metadata, "status": "success", "total_results": num_hits}


def count_hits(text: str) -> int:
    """Hits in the JSON of a search server; text that is none has one."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return int(bool(text.strip()))
    if isinstance(found, dict):
        found = next((found[name] for name in HITS if isinstance(found.get(name), list)), [found])
    return len(found) if isinstance(found, list) else 1

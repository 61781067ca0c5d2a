"""A tool that answers read-only SQL over a SQLite file, with limits on time, rows and memory.

    tools:
      - class_name: sql_tool.SqlTool
        config: {type: native, database: runs/sql/world.db, seconds: 2, max_rows: 20}

A connection belongs to one trajectory. It may read tables and nothing else: SQLite opens the file
read-only, and asks `may` about each part of a statement before it runs.
"""

import sqlite3
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl.protocol.trajectory import InfraFault
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

MAX_SQL_CHARACTERS = 2000
MAX_CELL_CHARACTERS = 200
MAX_VALUE_BYTES = 1 << 20
STEPS_BETWEEN_CHECKS = 1000
ALLOWED = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION)
SCHEMA = {
    "type": "function",
    "function": {
        "name": "sql",
        "description": "Runs one SELECT.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string"}},
            "required": ["query"],
        },
    },
}


class SqlTool(BaseTool):
    """Its methods block, so they are plain functions: leases run them in threads."""

    def __init__(
        self, config: Mapping[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        super().__init__(config, tool_schema)
        self.database = Path(config["database"]).resolve()
        self.seconds = float(config.get("seconds", 2))
        self.max_rows = int(config.get("max_rows", 20))
        if not self.database.is_file():
            raise FileNotFoundError(f"SqlTool: there is no database {config['database']!r}")
        self._connections: dict[str, sqlite3.Connection] = {}

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema | None:
        given = super().get_openai_tool_schema()
        return given or OpenAIFunctionToolSchema.model_validate(SCHEMA)

    def create(self, instance_id: str, **kwargs: Any) -> tuple[str, ToolResponse]:
        try:
            connection = sqlite3.connect(
                f"{self.database.as_uri()}?mode=ro", uri=True, check_same_thread=False
            )
        except sqlite3.Error as error:
            raise InfraFault(f"cannot open {self.database}: {error}") from error
        connection.set_authorizer(may)
        if sys.version_info >= (3, 11):
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
        self._connections[instance_id] = connection
        return instance_id, ToolResponse()

    def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        query = parameters.get("query")
        if not isinstance(query, str) or len(query) > MAX_SQL_CHARACTERS:
            raise ValueError(f"'query' must be a text of at most {MAX_SQL_CHARACTERS} characters")
        connection = self._connections[instance_id]
        deadline = time.monotonic() + self.seconds
        connection.set_progress_handler(lambda: time.monotonic() > deadline, STEPS_BETWEEN_CHECKS)
        try:
            rows = connection.execute(query).fetchmany(self.max_rows + 1)
        except sqlite3.Error as error:
            if time.monotonic() > deadline:
                raise ValueError(f"the query took longer than {self.seconds:g} s") from error
            raise ValueError(f"{error}") from error
        finally:
            connection.set_progress_handler(None, 0)
        lines = [" | ".join(str(cell)[:MAX_CELL_CHARACTERS] for cell in row) for row in rows]
        if len(lines) > self.max_rows:
            lines[self.max_rows :] = [f"(only the first {self.max_rows} rows are shown)"]
        text = "\n".join(lines) or "(no rows)"
        return ToolResponse(text=text), 0.0, {"rows": min(len(rows), self.max_rows)}

    def release(self, instance_id: str, **kwargs: Any) -> None:
        connection = self._connections.pop(instance_id, None)
        if connection is not None:
            connection.close()


def may(action: int, first: str | None, second: str | None, *_: Any) -> int:
    """Reading tables and calling SQL functions is allowed, except those that load code."""
    is_allowed = action in ALLOWED and second not in ("load_extension", "readfile", "writefile")
    return sqlite3.SQLITE_OK if is_allowed else sqlite3.SQLITE_DENY

"""The descriptions of tools that a model is shown, from the file that configures the tools.

Only the descriptions: prompts are measured with them. Making the tools is left to who runs them.
"""

import logging
from pathlib import Path
from typing import Any

import yaml

from verl.utils.dataset.tables import DataError

logger = logging.getLogger(__name__)


def load_tool_schemas(path: str | None) -> list[dict[str, Any]]:
    """The `tool_schema` of every entry below `tools`; none without a file."""
    if path is None:
        return []
    try:
        content = yaml.safe_load(Path(path).expanduser().read_text())
    except (OSError, yaml.YAMLError) as error:
        raise DataError(f"data.tool_config_path ({path}) cannot be read: {error}") from error
    entries = content.get("tools") if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise DataError(f"data.tool_config_path ({path}) has no list of `tools`")
    stated = [entry.get("tool_schema") for entry in entries if isinstance(entry, dict)]
    schemas = [schema_without_nulls(schema) for schema in stated if isinstance(schema, dict)]
    if len(schemas) < len(entries):
        logger.warning(
            "%d of %d tools in %s have no tool_schema; they do not count in the length of prompts",
            len(entries) - len(schemas), len(entries), path,
        )  # fmt: skip
    return schemas


def schema_without_nulls(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {
            key: schema_without_nulls(value) for key, value in schema.items() if value is not None
        }
    if isinstance(schema, list):
        return [schema_without_nulls(value) for value in schema]
    return schema

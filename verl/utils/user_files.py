"""JSON and YAML files that users write: what is wrong with one is a sentence that names it."""

import json
from pathlib import Path
from typing import Any

import yaml

from verl.utils.environment import Misuse


class BrokenFile(Misuse, ValueError):
    """A file that is there and has not the form that it must have."""


def read_json(path: Path) -> Any:
    try:
        return json.loads(read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise BrokenFile(f"{path} is no JSON: {error}") from error


def read_json_object(path: Path) -> dict[str, Any]:
    content = read_json(path)
    if not isinstance(content, dict):
        raise BrokenFile(f"{path} holds {content!r:.80}; it must hold a JSON object, {{...}}")
    return content


def read_yaml(path: Path) -> Any:
    try:
        return yaml.safe_load(read_text(path))
    except (yaml.YAMLError, RecursionError) as error:
        raise BrokenFile(f"{path} is no YAML: {error}") from error


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BrokenFile(f"{path} is no text in UTF-8: {error}") from error
    except OSError as error:
        raise BrokenFile(f"{path} cannot be read: {error.strerror}") from error

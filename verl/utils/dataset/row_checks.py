"""What a row of a prompt dataset must have.

Rows come from JSON or Arrow, so mappings are `dict` and sequences are `list`; asking for exactly
these is several times faster than asking for the abstract types, and it is asked of every message.
"""

import math
from collections.abc import Mapping
from typing import Any

ANSWER_COLUMNS = ("ground_truth", "answer")
CHECKED_COLUMNS = ("reward_model", "extra_info", *ANSWER_COLUMNS)


def fault_of(row: Mapping[str, Any], prompt_key: str) -> str | None:
    """What is wrong with a row, or None."""
    if prompt_key not in row:
        return f"has no column {prompt_key!r} (data.prompt_key); its columns are {sorted(row)}"
    fault = prompt_fault(row[prompt_key])
    if fault is not None:
        return f"{prompt_key} {fault}"
    answer = ground_truth_of(row)
    if isinstance(answer, float) and math.isnan(answer):
        return "has NaN for an answer"
    for column in ("reward_model", "extra_info"):
        if row.get(column) is not None and not isinstance(row[column], dict):
            return f"{column} is {type(row[column]).__name__}, not a mapping"
    return None


def ground_truth_of(row: Mapping[str, Any]) -> Any:
    """The answer, from `reward_model.ground_truth` or a column of its own; None without one."""
    reward_model = row.get("reward_model")
    if isinstance(reward_model, dict) and reward_model.get("ground_truth") is not None:
        return reward_model["ground_truth"]
    return next((row[name] for name in ANSWER_COLUMNS if row.get(name) is not None), None)


def prompt_fault(prompt: Any) -> str | None:
    """What is wrong with a prompt: it is a text, or messages with a role and a content each."""
    if prompt is None:
        return "is null"
    if isinstance(prompt, str):
        return None if prompt else "is empty"
    if not isinstance(prompt, list):
        return f"is {type(prompt).__name__}; it must be a text or a list of messages"
    if not prompt:
        return "has no messages"
    for place, message in enumerate(prompt):
        fault = message_fault(message)
        if fault is not None:
            return f"message {place} {fault}"
    return None


def message_fault(message: Any) -> str | None:
    if not isinstance(message, dict) or "role" not in message or "content" not in message:
        return "is no mapping with role and content"
    if not isinstance(message["role"], str):
        return f"has a role that is {type(message['role']).__name__}, not text"
    content = message["content"]
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return None
    if isinstance(content, list):
        is_part = [isinstance(part, dict) for part in content]
        return None if all(is_part) else f"has part {is_part.index(False)} that is no mapping"
    return f"has content that is {type(content).__name__}, neither text nor a list of parts"

"""What a row of a prompt dataset must have, and what happens to those that do not.

A bad row is named with its file, row and reason, and left out. A run starts when fewer than one row
in a hundred is bad; with more, something is wrong with the data as a whole, and it stops.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from verl.utils.dataset.tables import BadRow, DataError
from verl.utils.printable import printable

logger = logging.getLogger(__name__)

MAX_BAD_SHARE = 0.01
ANSWER_COLUMNS = ("ground_truth", "answer")


def fault_of(row: Mapping[str, Any], prompt_key: str) -> str | None:
    """What is wrong with a row, or None."""
    if prompt_key not in row:
        return f"has no column {prompt_key!r} (data.prompt_key); its columns are {sorted(row)}"
    fault = _prompt_fault(row[prompt_key])
    if fault is not None:
        return f"{prompt_key} {fault}"
    answer = ground_truth_of(row)
    if isinstance(answer, float) and math.isnan(answer):
        return "has NaN for an answer"
    for column in ("reward_model", "extra_info"):
        if row.get(column) is not None and not isinstance(row[column], Mapping):
            return f"{column} is {type(row[column]).__name__}, not a mapping"
    return None


def ground_truth_of(row: Mapping[str, Any]) -> Any:
    """The answer, from `reward_model.ground_truth` or a column of its own; None without one."""
    reward_model = row.get("reward_model")
    if isinstance(reward_model, Mapping) and reward_model.get("ground_truth") is not None:
        return reward_model["ground_truth"]
    return next((row[name] for name in ANSWER_COLUMNS if row.get(name) is not None), None)


def _prompt_fault(prompt: Any) -> str | None:
    if prompt is None:
        return "is null"
    if isinstance(prompt, str):
        return _text_fault(prompt)
    if not isinstance(prompt, Sequence):
        return f"is {type(prompt).__name__}; it must be a text or a list of messages"
    if not prompt:
        return "has no messages"
    for place, message in enumerate(prompt):
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            return f"message {place} is no mapping with role and content"
        fault = _message_fault(message)
        if fault is not None:
            return f"message {place} {fault}"
    return None


def _message_fault(message: Mapping[str, Any]) -> str | None:
    if not isinstance(message["role"], str):
        return f"has a role that is {type(message['role']).__name__}, not text"
    content = message["content"]
    if isinstance(content, str):
        return _text_fault(content, may_be_empty=True)
    if not isinstance(content, Sequence):
        return f"has content that is {type(content).__name__}, neither text nor a list of parts"
    return None


def _text_fault(text: str, *, may_be_empty: bool = False) -> str | None:
    if not text and not may_be_empty:
        return "is empty"
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return f"is not valid Unicode at character {error.start} (half of a surrogate pair)"
    return None


def settle(bad_rows: Sequence[BadRow], num_rows: int) -> None:
    """Log the bad rows, or stop when they are too many."""
    if not num_rows:
        raise DataError("the files have no rows")
    shown = "\n".join(f"  {printable(bad, max_characters=300)}" for bad in bad_rows[:20])
    more = f"\n  and {len(bad_rows) - 20} more" if len(bad_rows) > 20 else ""
    if len(bad_rows) / num_rows >= MAX_BAD_SHARE:
        raise DataError(
            f"{len(bad_rows)} of {num_rows} rows are bad; a run starts when fewer than "
            f"{MAX_BAD_SHARE:.0%} are:\n{shown}{more}"
        )
    if bad_rows:
        logger.warning("%d of %d rows are left out:\n%s%s", len(bad_rows), num_rows, shown, more)

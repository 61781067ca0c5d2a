"""Tool calls in what a model writes, in the form that Hermes and Qwen models are trained on.

    <tool_call>
    {"name": "weather", "arguments": {"city": "Bern"}}
    </tool_call>

Text outside is given on as it comes; a block is kept until it is whole. A block that is not such an
object is text like any other: a client then sees what the model wrote.
"""

import json
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class WrittenCall(BaseModel):
    """What stands in a block."""

    model_config = ConfigDict(strict=True)

    name: str
    arguments: dict[str, JsonValue]


@dataclass(frozen=True)
class FoundCall:
    """A call, with its arguments as JSON text."""

    name: str
    arguments: str


class ToolCallReader:
    """Finds the calls in a text that comes in pieces."""

    def __init__(self) -> None:
        self._held = ""

    def add(self, text: str) -> list[str | FoundCall]:
        """What has become certain: text and calls in the order in which they were written."""
        self._held += text
        found: list[str | FoundCall] = []
        while (start := self._held.find(OPEN)) >= 0:
            end = self._held.find(CLOSE, start)
            if end < 0:
                break
            block_end = end + len(CLOSE)
            call = parse_call(self._held[start + len(OPEN) : end])
            found.append(self._held[:start])
            found.append(call or self._held[start:block_end])
            self._held = self._held[block_end:]
        certain = start if start >= 0 else len(self._held) - self._num_doubtful()
        found.append(self._held[:certain])
        self._held = self._held[certain:]
        return [piece for piece in found if piece]

    def finish(self) -> str:
        """A block that was never closed is text."""
        text, self._held = self._held, ""
        return text

    def _num_doubtful(self) -> int:
        longest = min(len(OPEN) - 1, len(self._held))
        fits = (n for n in range(longest, 0, -1) if OPEN.startswith(self._held[-n:]))
        return next(fits, 0)


def parse_call(block: str) -> FoundCall | None:
    """The call in a block, or None if it is something else."""
    try:
        written = WrittenCall.model_validate_json(block.strip())
    except ValidationError:  # a model may write anything; what is no call stays text
        return None
    return FoundCall(written.name, json.dumps(written.arguments, ensure_ascii=False))

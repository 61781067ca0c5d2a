"""Tool calls in a turn that comes in pieces, in the format that the model writes.

    pieces --reader--> text as soon as it is certain, calls as soon as they are whole

Formats of blocks (hermes, Qwen coder, GLM, ...) are read block by block: a block that is no call of
an offered tool is text like any other. Other formats say what a turn is only at its end: text
before their first mark is passed on as it comes, the rest when the turn has ended; if one of its
calls is none of an offered tool, all of it is text. Either way the client sees what the model
wrote.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Any

from verl.server.encoding import template_tool
from verl.server.samples import Piece, StopCutter
from verl.server.schemas import ChatRequest
from verl.tools.parsers import (
    MAX_CALLS,
    BlockFormat,
    BlockReader,
    BlockToolParser,
    FunctionCall,
    Schemas,
    ToolParser,
    num_doubtful,
    parameters_of,
)

Parts = list[str | FunctionCall]


class CallReader(ABC):
    """Reads one turn."""

    @abstractmethod
    async def add(self, piece: Piece) -> Parts:
        """What has become certain, in the order in which it was written; with the last piece, all
        that is left."""


def call_reader(parser: ToolParser, request: ChatRequest) -> CallReader:
    """The reader of a turn in which the tools of the request are offered."""
    tools = [template_tool(tool) for tool in request.offered_tools]
    block = parser.block_format if isinstance(parser, BlockToolParser) else None
    if block is not None:
        return BlockCallReader(block, parameters_of(tools))
    return TurnCallReader(parser, tools, request.stops)


class BlockCallReader(CallReader):
    """Reads blocks in linear time. Calls of tools that are not among `schemas`, and those after the
    first `MAX_CALLS`, stay text; so does a block that is never closed."""

    def __init__(self, block: BlockFormat, schemas: Schemas) -> None:
        self._block = block
        self._schemas = schemas
        self._blocks = BlockReader(block.opening, block.closing)
        self._num_calls = 0

    async def add(self, piece: Piece) -> Parts:
        parts = self.add_text(piece.text)
        return parts if piece.finish_reason is None else [*parts, self.finish()]

    def add_text(self, text: str) -> Parts:
        parts: Parts = []
        for part in self._blocks.add(text):
            parts += [part] if isinstance(part, str) else self._calls_or_text(part.body)
        return parts

    def finish(self) -> str:
        rest = self._blocks.finish()
        return rest if isinstance(rest, str) else self._block.opening + rest.body

    def _calls_or_text(self, body: str) -> Parts:
        if self._num_calls < MAX_CALLS:
            calls = self._block.read(body, self._schemas)
            if are_calls(calls, self._schemas) and self._num_calls + len(calls) <= MAX_CALLS:
                self._num_calls += len(calls)
                return [*calls]
        return [self._block.opening + body + self._block.closing]


class TurnCallReader(CallReader):
    """Reads the calls of a turn at its end, from its ids."""

    def __init__(
        self, parser: ToolParser, tools: Sequence[dict[str, Any]], stops: tuple[str, ...]
    ) -> None:
        self._parser = parser
        self._tools = tools
        self._stops = stops
        self._ids: list[int] = []
        self._given: list[str] = []
        self._held: list[str] = []
        self._is_certain = bool(parser.openings)  # no mark has come yet

    async def add(self, piece: Piece) -> Parts:
        self._ids += piece.token_ids
        self._held.append(piece.text)
        if piece.finish_reason is None:
            text = self._certain_text()
            self._given.append(text)
            return [text]
        given, held = "".join(self._given), "".join(self._held)
        outside, calls = await self._parser.extract_tool_calls(self._ids, self._tools)
        if not are_calls(calls, parameters_of(self._tools)):
            return [held]
        cutter = StopCutter(self._stops)
        outside = cutter.add(outside) + cutter.finish()
        return [outside.removeprefix(given), *calls]

    def _certain_text(self) -> str:
        """What stands before the first mark, and before what may become one."""
        if not self._is_certain:
            return ""
        text, marks = "".join(self._held), self._parser.openings
        starts = [start for mark in marks if (start := text.find(mark)) >= 0]
        self._is_certain = not starts
        end = min([*starts, *(len(text) - num_doubtful(text, mark) for mark in marks)])
        self._held = [text[end:]]
        return text[:end]


def are_calls(calls: Sequence[FunctionCall], offered: Collection[str]) -> bool:
    """Whether all of them are calls of offered tools, with arguments that can be read."""
    return all(call.name in offered and call.is_valid for call in calls)

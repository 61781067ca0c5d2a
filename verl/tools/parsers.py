"""Tool calls in what a model wrote: the registry of formats, and the parts that formats share.

    ids -> text, with those special tokens that the format uses -> text outside of calls, calls

A call that cannot be read is a call all the same: its arguments are what the model wrote, so that
`FunctionCall.parsed_arguments` fails with a sentence for the model. Only the calls after the first
`MAX_CALLS` stay text. Every format is read in linear time, by searching for its marks. The formats
themselves are in `verl/tools/call_formats.py`; `hermes`, the most common one, is here.
"""

import inspect
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar

from pydantic import BaseModel
from pydantic_core import from_json
from transformers import PreTrainedTokenizerBase

from verl.utils.dataset.prompts import special_texts
from verl.utils.registry import Registry

MAX_CALLS = 128
"""Calls in one turn, as many as OpenAI takes."""
OPEN, CLOSE = "<tool_call>", "</tool_call>"
_SURROGATE = re.compile("[\ud800-\udfff]")
_NAME = re.compile(r'"name"\s*:\s*"([^"\\]{1,256})"')

Tools = Sequence[Mapping[str, Any] | BaseModel]
Parsed = tuple[str, "list[FunctionCall]"]
Kind = TypeVar("Kind", bound="type[ToolParser]")


class FunctionCall(BaseModel):
    """A call as the model wrote it; `arguments` is JSON text unless the model made a mistake."""

    name: str
    arguments: str
    tool_call_id: str | None = None

    def parsed_arguments(self) -> dict[str, Any]:
        """The arguments; otherwise a ValueError whose text tells the model what is wrong."""
        try:
            arguments = from_json(self.arguments, allow_inf_nan=False)
        except ValueError as error:
            raise ValueError(f"Invalid JSON in arguments for '{self.name}': {error}") from None
        if not isinstance(arguments, dict):
            kind = type(arguments).__name__
            raise ValueError(
                f"Invalid JSON in arguments for '{self.name}': expected an object, found a {kind}"
            )
        return arguments

    @property
    def is_valid(self) -> bool:
        try:
            self.parsed_arguments()
        except ValueError:
            return False
        return True


class ToolParser(ABC):
    """Reads the calls of one format. A class of yours needs `extract_tool_calls` and a name:

    @ToolParser.register("my_format")
    class MyParser(ToolParser):
        async def extract_tool_calls(self, responses_ids, tools=None):
            ...
    """

    stop_tokens: ClassVar[tuple[str, ...]] = ()
    """Tokens after which the model waits for the tool; where the tokenizer lacks one, nothing."""

    openings: ClassVar[tuple[str, ...]] = ()
    """Marks before the first of which a turn is text for certain. Without any, nothing is certain
    before the turn has ended."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let the loop pass `tools` to parsers that were written before there were any."""
        super().__init_subclass__(**kwargs)
        if "extract_tool_calls" in vars(cls):
            cls.extract_tool_calls = takes_tools(vars(cls)["extract_tool_calls"])

    @abstractmethod
    async def extract_tool_calls(
        self, responses_ids: list[int], tools: Tools | None = None
    ) -> Parsed:
        """The text outside of calls, and the calls, of one turn of the model.

        `tools` are the schemas that were offered; formats without types read arguments by them.
        """

    def decode(self, token_ids: list[int]) -> str:
        """The text of these ids; of special tokens, only those of the format are in it."""
        text = self.tokenizer.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text

    @property
    def stop_token_ids(self) -> list[int]:
        """Ids that end a turn, to be added to those of the sampling parameters."""
        ids = (self.tokenizer.convert_tokens_to_ids(token) for token in self.stop_tokens)
        return [i for i in ids if isinstance(i, int) and i != self.tokenizer.unk_token_id]

    @classmethod
    def get_tool_parser(cls, name: str, tokenizer: PreTrainedTokenizerBase) -> "ToolParser":
        return tool_parsers[name](tokenizer)

    @classmethod
    def register(cls, name: str) -> Callable[[Kind], Kind]:
        return tool_parsers.register(name)


def takes_tools(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, or one around it that leaves out `tools` where it has no place for them."""
    if len(inspect.signature(method).parameters) != 2:
        return method

    async def extract_tool_calls(self: ToolParser, ids: list[int], tools: Any = None) -> Any:
        del tools
        return await method(self, ids)

    return extract_tool_calls


class TextToolParser(ToolParser):
    """A format that is read from text. `marks` are the special tokens that it is made of; all
    others (the end of the turn, padding) are not part of the text."""

    marks: ClassVar[tuple[str, ...]] = ()

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(tokenizer)
        self._left_out = frozenset(
            tokenizer.convert_tokens_to_ids(text)
            for text in special_texts(tokenizer)
            if text not in self.marks
        )

    async def extract_tool_calls(
        self, responses_ids: list[int], tools: Tools | None = None
    ) -> Parsed:
        return self.parse(self.decode(responses_ids), parameters_of(tools))

    def decode(self, token_ids: list[int]) -> str:
        ids = [i for i in token_ids if i not in self._left_out]
        text = self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    @abstractmethod
    def parse(self, text: str, schemas: "Schemas") -> Parsed:
        """The text outside of calls, and the calls."""


# ---- schemas of the offered tools ----------------------------------------------------------------

Schemas = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""Of each tool, the schema of each parameter."""


def parameters_of(tools: Tools | None) -> Schemas:
    found: dict[str, Mapping[str, Mapping[str, Any]]] = {}
    for tool in tools or ():
        plain = tool.model_dump(exclude_none=True) if isinstance(tool, BaseModel) else tool
        function = plain.get("function", plain)
        found[function["name"]] = (function.get("parameters") or {}).get("properties") or {}
    return found


# ---- blocks between two marks --------------------------------------------------------------------


class Block(NamedTuple):
    """What stands between two marks; the last one of a text may never be closed."""

    body: str
    is_closed: bool = True


class BlockReader:
    """Splits a text that comes in pieces into what stands outside and inside of two marks."""

    def __init__(self, opening: str, closing: str) -> None:
        self._opening = opening
        self._closing = closing
        self._held = ""
        self._body: list[str] | None = None

    def add(self, text: str) -> list[str | Block]:
        """What has become certain: texts and blocks in the order in which they were written."""
        found: list[str | Block] = []
        text, self._held = self._held + text, ""
        place = 0
        while True:
            mark = self._opening if self._body is None else self._closing
            start = text.find(mark, place)
            if start < 0:
                break
            if self._body is None:
                found.append(text[place:start])
                self._body = []
            else:
                self._body.append(text[place:start])
                found.append(Block("".join(self._body)))
                self._body = None
            place = start + len(mark)
        certain = len(text) - num_doubtful(text[place:], mark)
        (found if self._body is None else self._body).append(text[place:certain])
        self._held = text[certain:]
        return [part for part in found if part != ""]

    def finish(self) -> str | Block:
        """What was held back; a block if one is still open."""
        rest, self._held = self._held, ""
        body, self._body = self._body, None
        return rest if body is None else Block("".join(body) + rest, is_closed=False)


def num_doubtful(text: str, mark: str) -> int:
    """Characters at the end that may be the beginning of the mark."""
    longest = min(len(mark) - 1, len(text))
    fits = (n for n in range(longest, 0, -1) if mark.startswith(text[-n:]))
    return next(fits, 0)


@dataclass(frozen=True, kw_only=True)
class BlockFormat:
    """Calls in blocks: the marks around one, what is read from it, and marks around all of them,
    which are no text."""

    opening: str
    closing: str
    read: Callable[[str, Schemas], list[FunctionCall]]
    around: tuple[str, ...] = ()

    def parse(self, text: str, schemas: Schemas, *, max_calls: int = MAX_CALLS) -> Parsed:
        reader = BlockReader(self.opening, self.closing)
        texts: list[str] = []
        calls: list[FunctionCall] = []
        for part in [*reader.add(text), reader.finish()]:
            if isinstance(part, str):
                texts.append(part)
            elif len(calls) < max_calls:
                calls += self.read(part.body, schemas)[: max_calls - len(calls)]
            else:
                texts += [self.opening, part.body, self.closing if part.is_closed else ""]
        outside = "".join(texts)
        for mark in self.around:
            outside = outside.replace(mark, "")
        return outside, calls


# ---- calls that are JSON objects -----------------------------------------------------------------


def json_text(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    # Half of a surrogate pair is no text; escaped, it is JSON that `parsed_arguments` refuses.
    return text if text.isascii() or not _SURROGATE.search(text) else json.dumps(value)


def json_calls(text: str) -> list[FunctionCall]:
    """The call in `{"name": ..., "arguments": {...}}`, or the calls in a list of such objects.

    Llama names the arguments `parameters`. Text in their place holds JSON itself; an object
    without any is a mistake.
    """
    try:
        written = from_json(text.strip(), allow_inf_nan=False)
    except ValueError:
        name = _NAME.search(text)
        return [FunctionCall(name=name[1] if name else "", arguments=text.strip())]
    objects = written if isinstance(written, list) and written else [written]
    return [call_of_object(one) for one in objects[:MAX_CALLS]]


def json_call(text: str) -> FunctionCall:
    """Like `json_calls`, for formats that have one call in a block."""
    calls = json_calls(text)
    return calls[0] if len(calls) == 1 else FunctionCall(name="", arguments=text.strip())


def call_of_object(written: Any) -> FunctionCall:
    if not isinstance(written, dict) or not isinstance(written.get("name"), str):
        return FunctionCall(name="", arguments=json_text(written))
    arguments = written.get("arguments", written.get("parameters", ""))
    return FunctionCall(
        name=written["name"],
        arguments=arguments if isinstance(arguments, str) else json_text(arguments),
        tool_call_id=written["id"] if isinstance(written.get("id"), str) else None,
    )


class BlockToolParser(TextToolParser):
    """Formats of blocks: each reads what the one before it left as text."""

    formats: ClassVar[tuple[BlockFormat, ...]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for one in cls.formats:
            cls.marks = (*cls.marks, one.opening, one.closing, *one.around)
        if cls.parse is BlockToolParser.parse:
            marks = [mark for one in cls.formats for mark in (one.opening, *one.around)]
            cls.openings = tuple(marks)

    @property
    def block_format(self) -> BlockFormat | None:
        """The format of blocks that are all there is to read, so that each can be read alone."""
        is_all = type(self).parse is BlockToolParser.parse and len(self.formats) == 1
        return self.formats[0] if is_all and not self.formats[0].around else None

    def parse(self, text: str, schemas: Schemas) -> Parsed:
        calls: list[FunctionCall] = []
        for one in self.formats:
            text, more = one.parse(text, schemas, max_calls=MAX_CALLS - len(calls))
            calls += more
        return text, calls


class HermesToolParser(BlockToolParser):
    """`<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>`: Hermes, Qwen 2.5, Qwen 3."""

    formats = (
        BlockFormat(opening=OPEN, closing=CLOSE, read=lambda body, _schemas: [json_call(body)]),
    )


_OTHERS = "verl.tools.call_formats"
_PYTHON = "verl.tools.python_formats"

tool_parsers = Registry[type[ToolParser]](
    "tool-call format (actor_rollout_ref.rollout.multi_turn.format)",
    hermes=HermesToolParser,
    qwen3_coder=f"{_OTHERS}:Qwen3CoderToolParser",
    seed=f"{_OTHERS}:SeedToolParser",
    glm=f"{_OTHERS}:GlmToolParser",
    minimax=f"{_OTHERS}:MiniMaxToolParser",
    deepseek=f"{_OTHERS}:DeepSeekToolParser",
    deepseek_v3=f"{_OTHERS}:DeepSeekToolParser",
    deepseek_v4=f"{_OTHERS}:DsmlToolParser",
    kimi=f"{_OTHERS}:KimiToolParser",
    gemma=f"{_OTHERS}:GemmaToolParser",
    gemma4=f"{_OTHERS}:Gemma4ToolParser",
    mistral=f"{_OTHERS}:MistralToolParser",
    llama3_json=f"{_PYTHON}:Llama3JsonToolParser",
    pythonic=f"{_PYTHON}:PythonicToolParser",
    code=f"{_PYTHON}:CodeToolParser",
    **{"gpt-oss": f"{_OTHERS}:HarmonyToolParser"},
)

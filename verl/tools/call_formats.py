"""How families of models write tool calls; `docs/tool_formats.md` lists which model writes which.

Formats of one shape share a reader and differ in a line of a table: tags with parameters in them
(Qwen coder, Seed, MiniMax, DeepSeek 3.2 and 4), a name beside JSON (DeepSeek 3, Kimi, Mistral,
harmony), Python (Llama, LFM, Gemma 3, fenced code). Values between tags have no type of their own:
the schema of the offered tool says what they are. Python is parsed, never run.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from verl.tools.parsers import (
    CLOSE,
    MAX_CALLS,
    OPEN,
    BlockFormat,
    BlockToolParser,
    FunctionCall,
    Parsed,
    Schemas,
    TextToolParser,
    json_call,
    json_calls,
    json_text,
)
from verl.tools.python_formats import WORDS, code_call, fenced_calls, python_calls

# ---- values without a type -----------------------------------------------------------------------


def typed_value(text: str, schema: Mapping[str, Any] | None) -> Any:
    """A value between tags, as its schema has it; JSON or text where there is no schema.

    What does not fit the schema stays text, so that the tool can say what it expected.
    """
    types = types_of(schema) if schema is not None else set[str]()
    if "string" in types:
        return None if text == "null" and "null" in types else text
    if types and (word := text.strip().lower()) in WORDS:
        return WORDS[word]
    try:
        value = from_json(text, allow_inf_nan=False)
    except ValueError:
        return text
    return text if isinstance(value, str) and not types else value


def types_of(schema: Mapping[str, Any]) -> set[str]:
    own = schema.get("type") or ()
    found: set[str] = {own} if isinstance(own, str) else set(own)
    for key in ("anyOf", "oneOf"):
        for choice in schema.get(key) or ():
            found |= types_of(choice)
    return found


# ---- tags ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Tags:
    """A call as a tag with its name, which holds a tag for each parameter."""

    call: str
    call_end: str
    parameter: str
    parameter_end: str
    is_on_lines: bool = False
    """Whether a value is surrounded by newlines that are not part of it."""

    def read(self, body: str, schemas: Schemas) -> list[FunctionCall]:
        """The calls in a block; a block without any is one that cannot be read."""
        calls: list[FunctionCall] = []
        place = 0
        while (start := body.find(self.call, place)) >= 0:
            end = body.find(self.call_end, start)
            place = end if end >= 0 else len(body)
            calls.append(self._call(body[start + len(self.call) : place], schemas))
        return calls or [FunctionCall(name="", arguments=body)]

    def _call(self, body: str, schemas: Schemas) -> FunctionCall:
        head, _, rest = body.partition(">")
        name = head.partition('"')[0].strip()
        arguments = self._arguments(rest, schemas.get(name, {}))
        is_text = arguments is None
        return FunctionCall(name=name, arguments=rest.strip() if is_text else json_text(arguments))

    def _arguments(
        self, text: str, schema: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, Any] | None:
        """None for what is not just parameters."""
        arguments: dict[str, Any] = {}
        place = 0
        while (start := text.find(self.parameter, place)) >= 0:
            value_start = text.find(">", start)
            end = text.find(self.parameter_end, value_start)
            if text[place:start].strip() or value_start < 0 or end < 0:
                return None
            key, _, attributes = text[start + len(self.parameter) : value_start].partition('"')
            value = text[value_start + 1 : end]
            if self.is_on_lines:
                value = value.removeprefix("\n").removesuffix("\n")
            if 'string="true"' in attributes:
                arguments[key.strip()] = value
            else:
                arguments[key.strip()] = typed_value(value, schema.get(key.strip()))
            place = end + len(self.parameter_end)
        return None if text[place:].strip() else arguments


EQUALS = Tags(
    call="<function=",
    call_end="</function>",
    parameter="<parameter=",
    parameter_end="</parameter>",
    is_on_lines=True,
)


def invoke(prefix: str = "") -> Tags:
    return Tags(
        call=f'<{prefix}invoke name="',
        call_end=f"</{prefix}invoke>",
        parameter=f'<{prefix}parameter name="',
        parameter_end=f"</{prefix}parameter>",
    )


class Qwen3CoderToolParser(BlockToolParser):
    """`<tool_call><function=f><parameter=x>1</parameter></function></tool_call>`: Qwen 3 Coder,
    Qwen 3.5 and later, Nemotron 3. The models forget the outer tags at times."""

    formats = (
        BlockFormat(opening=OPEN, closing=CLOSE, read=EQUALS.read),
        BlockFormat(
            opening=EQUALS.call,
            closing=EQUALS.call_end,
            read=lambda body, schemas: EQUALS.read(EQUALS.call + body + EQUALS.call_end, schemas),
            around=(CLOSE,),
        ),
    )


class SeedToolParser(BlockToolParser):
    """`<seed:tool_call><function=f><parameter=x>1</parameter></function></seed:tool_call>`."""

    formats = (
        BlockFormat(opening="<seed:tool_call>", closing="</seed:tool_call>", read=EQUALS.read),
    )


class MiniMaxToolParser(BlockToolParser):
    """`<minimax:tool_call><invoke name="f"><parameter name="x">1</parameter></invoke>...`: M2; and
    M1's lines of JSON in `<tool_calls>`."""

    formats = (
        BlockFormat(
            opening="<minimax:tool_call>", closing="</minimax:tool_call>", read=invoke().read
        ),
        BlockFormat(
            opening="<tool_calls>",
            closing="</tool_calls>",
            read=lambda body, _schemas: [json_call(line) for line in body.strip().splitlines()],
        ),
    )


class DsmlToolParser(BlockToolParser):
    """`<｜DSML｜tool_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="x" string="false">1`:
    DeepSeek 4; 3.2 has `function_calls` as the outer tag. Parameters say whether they are text."""

    marks = ("｜DSML｜",)
    formats = tuple(
        BlockFormat(
            opening=f"<｜DSML｜{tag}>", closing=f"</｜DSML｜{tag}>", read=invoke("｜DSML｜").read
        )
        for tag in ("tool_calls", "function_calls")
    )


def glm_call(body: str, schemas: Schemas) -> list[FunctionCall]:
    keys = body.split("<arg_key>")
    name = keys[0].strip()
    arguments: dict[str, Any] = {}
    for pair in keys[1:]:
        key, key_end, rest = pair.partition("</arg_key>")
        gap, value_tag, rest = rest.partition("<arg_value>")
        value, value_end, rest = rest.partition("</arg_value>")
        if gap.strip() or rest.strip() or not (key_end and value_tag and value_end):
            return [FunctionCall(name=name, arguments="<arg_key>".join(keys[1:]))]
        arguments[key.strip()] = typed_value(value, schemas.get(name, {}).get(key.strip()))
    return [FunctionCall(name=name, arguments=json_text(arguments))]


class GlmToolParser(BlockToolParser):
    """`<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>`: GLM 4.5 and later."""

    marks = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    stop_tokens = ("<|observation|>", "<|user|>")
    formats = (BlockFormat(opening=OPEN, closing=CLOSE, read=glm_call),)


# ---- a name beside JSON --------------------------------------------------------------------------

SEPARATOR = "<｜tool▁sep｜>"
ARGUMENT = "<|tool_call_argument_begin|>"


def deepseek_call(body: str, _schemas: Schemas) -> list[FunctionCall]:
    name, _, rest = body.partition(SEPARATOR)
    if name.strip() == "function" and "```json" in rest:
        name, _, rest = rest.partition("```json")
        rest = rest.rpartition("```")[0] or rest
    return [FunctionCall(name=name.strip(), arguments=rest.strip())]


class DeepSeekToolParser(BlockToolParser):
    """`<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": 1}<｜tool▁call▁end｜>`: DeepSeek 3.1.

    DeepSeek 3 and R1 write `function`, the separator, the name and a fence with JSON.
    """

    marks = (SEPARATOR,)
    formats = (
        BlockFormat(
            opening="<｜tool▁call▁begin｜>",
            closing="<｜tool▁call▁end｜>",
            read=deepseek_call,
            around=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        ),
    )


def kimi_call(body: str, _schemas: Schemas) -> list[FunctionCall]:
    identity, _, arguments = body.partition(ARGUMENT)
    identity = identity.strip()
    name = identity.rpartition(":")[0] or identity
    return [
        FunctionCall(
            name=name.removeprefix("functions."),
            arguments=arguments.strip(),
            tool_call_id=identity or None,
        )
    ]


class KimiToolParser(BlockToolParser):
    """`<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"x": 1}<|tool_call_end|>`."""

    marks = (ARGUMENT,)
    formats = (
        BlockFormat(
            opening="<|tool_call_begin|>",
            closing="<|tool_call_end|>",
            read=kimi_call,
            around=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        ),
    )


class MistralToolParser(TextToolParser):
    """`[TOOL_CALLS]f[ARGS]{"x": 1}`, where ids stand behind `[CALL_ID]`; the older form is a list
    of objects, `[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}]`."""

    marks = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    openings = ("[TOOL_CALLS]",)

    def parse(self, text: str, schemas: Schemas) -> Parsed:
        outside, *parts = text.split("[TOOL_CALLS]", MAX_CALLS)
        calls: list[FunctionCall] = []
        for part in parts:
            if part.lstrip().startswith("["):
                calls += json_calls(part)
                continue
            head, mark, arguments = part.partition("[ARGS]")
            if not mark:  # some versions have no token before the arguments
                head, brace, rest = part.partition("{")
                arguments = brace + rest
            name, _, identity = head.partition("[CALL_ID]")
            call = FunctionCall(name=name.strip(), arguments=arguments.strip())
            calls.append(call.model_copy(update={"tool_call_id": identity.strip() or None}))
        return outside, calls[:MAX_CALLS]


class HarmonyToolParser(TextToolParser):
    """`<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>`: gpt-oss.

    The text is what the model says to the user; its analysis is not part of it.
    """

    marks = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>")
    stop_tokens = ("<|call|>", "<|return|>")
    _ENDS = ("<|call|>", "<|end|>")

    def parse(self, text: str, schemas: Schemas) -> Parsed:
        texts: list[str] = []
        calls: list[FunctionCall] = []
        for message in text.split("<|start|>"):
            header, mark, body = message.partition("<|message|>")
            for end in self._ENDS:
                body = body.partition(end)[0]
            recipient = header.partition("to=")[2].partition("<|")[0].split(maxsplit=1)
            channel = header.partition("<|channel|>")[2].split(maxsplit=1)
            if recipient and len(calls) < MAX_CALLS:
                calls.append(self._call(recipient[0], body, schemas))
            elif channel[:1] != ["analysis"]:
                texts.append(body if mark else header.removeprefix("assistant"))
        return "".join(texts), calls

    def _call(self, recipient: str, body: str, schemas: Schemas) -> FunctionCall:
        if recipient == "python":
            return code_call(body, schemas)
        return FunctionCall(name=recipient.removeprefix("functions."), arguments=body.strip())


# ---- Gemma's own notation ------------------------------------------------------------------------

_BARE_KEY = re.compile(r'([{,]\s*)([^\s:{}\[\],"]+)\s*:')


def gemma_call(quote: str) -> Callable[[str, Schemas], list[FunctionCall]]:
    """`call:f{x:1,y:<quote>text<quote>}`: JSON but for its quotes, and keys that have none."""

    def read(body: str, _schemas: Schemas) -> list[FunctionCall]:
        head, brace, rest = body.partition("{")
        name = head.strip().removeprefix("call:")
        parts = (brace + rest).split(quote)
        parts[::2] = [_BARE_KEY.sub(r'\1"\2":', part) for part in parts[::2]]
        parts[1::2] = map(json_text, parts[1::2])
        return [FunctionCall(name=name.strip(), arguments="".join(parts))]

    return read


class Gemma4ToolParser(BlockToolParser):
    """`<|tool_call>call:f{x:1,y:<|"|>text<|"|>}<tool_call|>`."""

    marks = ('<|"|>',)
    stop_tokens = ("<|tool_response>",)
    formats = (
        BlockFormat(opening="<|tool_call>", closing="<tool_call|>", read=gemma_call('<|"|>')),
    )


class GemmaToolParser(BlockToolParser):
    """`<start_function_call>call:f{x:<escape>a<escape>}<end_function_call>`: FunctionGemma; and
    Python in a fence of `tool_code`: Gemma 3."""

    marks = ("<escape>",)
    openings = ("<start_function_call>", "```")
    stop_tokens = ("<start_function_response>",)
    formats = (
        BlockFormat(
            opening="<start_function_call>",
            closing="<end_function_call>",
            read=gemma_call("<escape>"),
        ),
    )

    def parse(self, text: str, schemas: Schemas) -> Parsed:
        outside, calls = super().parse(text, schemas)
        if calls:
            return outside, calls
        return fenced_calls(outside, ("tool_code",), lambda code: python_calls(code, schemas))

"""Calls that are written in Python, and programs that are calls themselves. Parsed, never run."""

import ast
import json
import re
import warnings
from collections.abc import Callable
from typing import Any

from verl.tools.parsers import (
    MAX_CALLS,
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

MAX_PYTHON_CHARACTERS = 100_000
"""Longer calls in Python are refused unparsed."""
WORDS = {"true": True, "false": False, "null": None, "none": None}
CODE_TOOL = "code_interpreter"

_BEGINS_CALL = re.compile(r"\[?\s*([A-Za-z_][\w.]*)\s*\(")


def python_calls(text: str, schemas: Schemas) -> list[FunctionCall]:
    """The calls in `[f(x=1), g(y="a")]` or `f(x=1)`; what is no such list is one bad call."""
    text = text.strip()
    try:
        nodes = python_nodes(text)
        return [call_of_node(node, schemas) for node in nodes[:MAX_CALLS]]
    except (SyntaxError, ValueError, MemoryError, RecursionError):  # whatever a model may write
        name = _BEGINS_CALL.match(text)
        return [FunctionCall(name=name[1] if name else "", arguments=text)]


def python_nodes(text: str) -> list[ast.expr]:
    if len(text) > MAX_PYTHON_CHARACTERS:
        raise ValueError(f"{len(text)} characters; at most {MAX_PYTHON_CHARACTERS} are parsed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a model's escape sequences
        body = ast.parse(text, mode="eval").body
    return body.elts if isinstance(body, ast.List | ast.Tuple) else [body]


def call_of_node(node: ast.expr, schemas: Schemas) -> FunctionCall:
    if not isinstance(node, ast.Call):
        raise ValueError(f"a {type(node).__name__} is no call")
    name = ast.unparse(node.func).removesuffix(".call")
    names = list(schemas.get(name, {}))
    if len(node.args) > len(names):
        raise ValueError("arguments have no names")
    arguments = {key: literal(value) for key, value in zip(names, node.args, strict=False)}
    for keyword in node.keywords:
        if keyword.arg is None or keyword.arg in arguments:
            raise ValueError("an argument has no name, or that of another")
        arguments[keyword.arg] = literal(keyword.value)
    return FunctionCall(name=name, arguments=json_text(arguments))


def literal(node: ast.expr) -> Any:
    """The value of a literal of Python, or one with JSON's true, false and null in it."""
    match node:
        case ast.Constant(value=None | bool() | str() | int() | float() as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.Name(id=word) if word in WORDS:
            return WORDS[word]
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [literal(one) for one in elements]
        case ast.Dict(keys=keys, values=values) if all(isinstance(k, ast.Constant) for k in keys):
            named = [key.value for key in keys if isinstance(key, ast.Constant)]
            return {str(key): literal(value) for key, value in zip(named, values, strict=True)}
    raise ValueError(f"{type(node).__name__} is no literal")


class PythonicToolParser(BlockToolParser):
    """`[f(x=1), g(y="a")]`: Llama 3.2 and 4; LFM puts marks around it. Without marks, a text that
    does not begin as such a list does is no call."""

    marks = ("<|python_tag|>",)
    stop_tokens = ("<|eom_id|>", "<|eot_id|>", "<|eom|>", "<|eot|>")
    formats = (
        BlockFormat(opening="<|tool_call_start|>", closing="<|tool_call_end|>", read=python_calls),
        BlockFormat(opening="<|python_start|>", closing="<|python_end|>", read=python_calls),
    )

    def parse(self, text: str, schemas: Schemas) -> Parsed:
        outside, calls = super().parse(text, schemas)
        bare = outside.strip().removeprefix("<|python_tag|>").strip()
        if calls or not (bare.startswith("[") and _BEGINS_CALL.match(bare)):
            return outside, calls
        return "", python_calls(bare, schemas)


class Llama3JsonToolParser(TextToolParser):
    """`{"name": "f", "parameters": {"x": 1}}`: Llama 3.1 and later, one or several with `;`
    between. Behind `<|python_tag|>` may also be `f.call(x=1)` or a program."""

    marks = ("<|python_tag|>",)
    stop_tokens = ("<|eom_id|>", "<|eot_id|>")
    _BEGINS = re.compile(r'\[?\s*\{\s*"(?:type|name)"\s*:')

    def parse(self, text: str, schemas: Schemas) -> Parsed:
        outside, tag, written = text.partition("<|python_tag|>")
        if not tag:
            outside, written = "", text
        written = written.strip()
        if self._BEGINS.match(written):
            rest, calls = self._objects(written)
            return outside + rest, calls
        if tag and ".call(" in written.partition("\n")[0]:
            return outside, python_calls(written, schemas)
        return (outside, [code_call(written, schemas)]) if tag else (text, [])

    def _objects(self, text: str) -> Parsed:
        calls: list[FunctionCall] = []
        decoder = json.JSONDecoder()
        place = 0
        while self._BEGINS.match(text, place) and len(calls) < MAX_CALLS:
            try:
                _, end = decoder.raw_decode(text, place)
            except (ValueError, RecursionError):
                return "", [*calls, json_call(text[place:])]
            calls += json_calls(text[place:end])
            place = end
            while place < len(text) and text[place] in "; ,\n\t\r":
                place += 1
        return text[place:], calls[:MAX_CALLS]


# ---- programs ------------------------------------------------------------------------------------


def code_call(code: str, schemas: Schemas) -> FunctionCall:
    """A program as a call of the offered tool that has a parameter `code`, or of the only tool if
    it has one parameter."""
    takers = [name for name, parameters in schemas.items() if "code" in parameters]
    if not takers and len(schemas) == 1:
        [(name, parameters)] = schemas.items()
        if len(parameters) == 1:
            return FunctionCall(name=name, arguments=json_text({next(iter(parameters)): code}))
    name = CODE_TOOL if CODE_TOOL in takers or not takers else takers[0]
    return FunctionCall(name=name, arguments=json_text({"code": code}))


def fenced_calls(
    text: str,
    languages: tuple[str, ...],
    read: Callable[[str], list[FunctionCall]],
    *,
    tool: str = "",
) -> Parsed:
    """What the fences of these languages hold, and the text around; others are text. `tool` is
    what a fence without an end would have called."""
    outside: list[str] = []
    calls: list[FunctionCall] = []
    parts = text.split("```")
    for index, part in enumerate(parts):
        language, newline, code = part.partition("\n")
        is_call = newline and language.strip().lower() in languages
        if index % 2 == 0:
            outside.append(part)
        elif not is_call or len(calls) >= MAX_CALLS:
            outside.append(f"```{part}" + ("```" if index + 1 < len(parts) else ""))
        elif index + 1 == len(parts):
            calls.append(FunctionCall(name=tool, arguments=f"```{part}"))
        else:
            calls += read(code)[: MAX_CALLS - len(calls)]
    return "".join(outside), calls


class CodeToolParser(TextToolParser):
    """A fence of Python is a call of the code tool."""

    openings = ("```",)

    def parse(self, text: str, schemas: Schemas) -> Parsed:
        tool = code_call("", schemas).name
        return fenced_calls(
            text, ("python", "py"), lambda code: [code_call(code, schemas)], tool=tool
        )

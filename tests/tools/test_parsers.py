"""Tool calls, as models write them and as they should not."""

import json
import re
import time
from pathlib import Path

import pytest
from tokenizers import AddedToken

from tests.server.engines import byte_tokenizer
from verl.tools.call_formats import KimiToolParser
from verl.tools.parsers import MAX_CALLS, FunctionCall, TextToolParser, ToolParser, tool_parsers

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": [1, "é"]}}\n</tool_call>'


async def extract(name, text, tools=None, special=()):
    """The result of a format for a text whose `special` words are special tokens."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [AddedToken(word, special=True) for word in special]}
    )
    parser = ToolParser.get_tool_parser(name, tokenizer)
    return await parser.extract_tool_calls(tokenizer.encode(text), tools)


ARGUMENTS = {"city": 'Zürich, "old" {town}', "days": 3, "exact": True, "at": [1.5, {"k": "v"}]}
TYPES = {"city": "string", "days": "integer", "exact": "boolean", "at": "array"}
SCHEMA = {"type": "object", "properties": {name: {"type": one} for name, one in TYPES.items()}}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "", "parameters": SCHEMA}},
    {
        "type": "function",
        "function": {
            "name": "run",
            "description": "",
            "parameters": {"type": "object", "properties": {"code": {"type": "string"}}},
        },
    },
]
JSON = json.dumps(ARGUMENTS, ensure_ascii=False)
CITY = ARGUMENTS["city"]
PYTHON = f"weather(city={CITY!r}, days=3, exact=True, at=[1.5, {{'k': 'v'}}])"
EQUALS = (
    f"<function=weather>\n<parameter=city>\n{CITY}\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    "<parameter=exact>\nTrue\n</parameter>\n"
    '<parameter=at>\n[1.5, {"k": "v"}]\n</parameter>\n</function>'
)
INVOKE = (
    f'<invoke name="weather">\n<parameter name="city">{CITY}</parameter>\n'
    '<parameter name="days">3</parameter>\n<parameter name="exact">true</parameter>\n'
    '<parameter name="at">[1.5, {"k": "v"}]</parameter>\n</invoke>'
)
DSML = re.sub(r"(</?)", r"\1｜DSML｜", INVOKE).replace('name="city"', 'name="city" string="true"')
GEMMA = 'call:weather{city:"C",days:3,exact:true,at:[1.5,{k:"v"}]}'
WRITTEN = {
    "hermes": f'<tool_call>\n{{"name": "weather", "arguments": {JSON}}}\n</tool_call>',
    "qwen3_coder": f"<tool_call>\n{EQUALS}\n</tool_call>",
    "qwen3_coder without outer tags": EQUALS,
    "seed": f"<seed:tool_call>\n{EQUALS}\n</seed:tool_call>",
    "glm": (
        f"<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>{CITY}</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n<arg_key>exact</arg_key>"
        "<arg_value>true</arg_value><arg_key>at</arg_key>"
        '<arg_value>[1.5, {"k": "v"}]</arg_value>\n</tool_call>'
    ),
    "minimax": f"<minimax:tool_call>\n{INVOKE}\n</minimax:tool_call>",
    "minimax in JSON": f'<tool_calls>\n{{"name": "weather", "arguments": {JSON}}}\n</tool_calls>',
    "deepseek": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
        f"```json\n{JSON}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "deepseek_v3 without fence": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
        f"{JSON}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "deepseek_v4": f"<｜DSML｜tool_calls>\n{DSML}\n</｜DSML｜tool_calls>",
    "deepseek_v4 of 3.2": f"<｜DSML｜function_calls>\n{DSML}\n</｜DSML｜function_calls>",
    "kimi": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
        f"<|tool_call_argument_begin|>{JSON}<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "mistral": f"[TOOL_CALLS]weather[ARGS]{JSON}",
    "mistral with id": f"[TOOL_CALLS]weather[CALL_ID]abc[ARGS]{JSON}",
    "mistral as list": f'[TOOL_CALLS] [{{"name": "weather", "arguments": {JSON}}}]',
    "gemma": (
        "<start_function_call>"
        + GEMMA.replace('"', "<escape>").replace("escape>C<", f"escape>{CITY}<")
        + "<end_function_call>"
    ),
    "gemma in Python": f"```tool_code\n{PYTHON}\n```",
    "gemma4": (
        "<|tool_call>" + GEMMA.replace('"', '<|"|>').replace(">C<", f">{CITY}<") + "<tool_call|>"
    ),
    "llama3_json": f'{{"name": "weather", "parameters": {JSON}}}',
    "llama3_json behind tag": f'<|python_tag|>{{"name": "weather", "parameters": {JSON}}}',
    "llama3_json as call": f"<|python_tag|>{PYTHON.replace('(', '.call(', 1)}",
    "pythonic": f"[{PYTHON}]",
    "pythonic of lfm": f"<|tool_call_start|>[{PYTHON}]<|tool_call_end|>",
    "gpt-oss": (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.weather <|constrain|>json<|message|>{JSON}<|call|>"
    ),
    "gpt-oss with recipient first": (
        f" to=functions.weather<|channel|>commentary json<|message|>{JSON}<|call|>"
    ),
}


@pytest.mark.parametrize("is_special", [False, True], ids=["marks in text", "marks as tokens"])
@pytest.mark.parametrize("case", WRITTEN)
async def test_a_call_is_read_as_the_model_meant_it(case, is_special):
    name = case.split()[0]
    marks = tool_parsers[name].marks if is_special else ()
    text, calls = await extract(name, WRITTEN[case] + "<|im_end|>", TOOLS, marks)
    assert [call.name for call in calls] == ["weather"]
    assert calls[0].parsed_arguments() == ARGUMENTS
    assert text.strip() == ""


@pytest.mark.parametrize("case", [case for case in WRITTEN if not case.startswith("llama3_json")])
async def test_several_calls_and_text_around_them(case):
    """But Llama's JSON, which has no beginning: see below."""
    name = case.split()[0]
    is_whole = case == "pythonic"
    written = f"[{PYTHON}, {PYTHON}]" if is_whole else f"Let me look.\n{WRITTEN[case]}"
    if not is_whole:
        written += ("<|start|>assistant" if name == "gpt-oss" else "") + WRITTEN[case]
    if name == "gpt-oss":
        written = written.replace(
            "Let me look.\n", "<|channel|>final<|message|>Let me look.<|end|><|start|>assistant"
        )
    text, calls = await extract(name, written, TOOLS)
    assert [call.parsed_arguments() for call in calls] == [ARGUMENTS] * 2
    assert text.strip() == ("" if is_whole else "Let me look.")


async def test_llama_writes_objects_one_after_the_other():
    one = WRITTEN["llama3_json"]
    text, calls = await extract("llama3_json", f"{one}; {one}\n{one}\nNow wait.")
    assert [call.parsed_arguments() for call in calls] == [ARGUMENTS] * 3
    assert text == "Now wait."


@pytest.mark.parametrize("name", sorted(n for n in tool_parsers if not n.endswith("_for_tests")))
@pytest.mark.parametrize("text", ["It is 3 < 4 [1, 2] {a} `x`.", '{"answer": 3}', "[1, 2]", ""])
async def test_what_is_no_call_stays_text(name, text):
    assert await extract(name, text, TOOLS) == (text, [])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("code", "So:\n```python\nprint(1)\n```\nand ```sh\nls\n```"),
        ("llama3_json", "<|python_tag|>print(1)\n"),
        ("gpt-oss", "<|channel|>analysis to=python<|message|>print(1)\n<|call|>"),
    ],
)
async def test_a_program_is_a_call_of_the_code_tool(name, text):
    _, calls = await extract(name, text, TOOLS)
    assert [(call.name, call.parsed_arguments()["code"].strip()) for call in calls] == [
        ("run", "print(1)")
    ]


async def test_ids_of_calls_are_kept():
    _, [kimi] = await extract("kimi", WRITTEN["kimi"])
    _, [mistral] = await extract("mistral", WRITTEN["mistral with id"])
    assert (kimi.tool_call_id, mistral.tool_call_id) == ("functions.weather:0", "abc")


async def test_values_follow_the_schema_not_their_looks():
    text = "<tool_call><function=f><parameter=x>12</parameter></function></tool_call>"

    async def value(schema):
        tool = {"function": {"name": "f", "parameters": {"properties": {"x": schema}}}}
        _, [call] = await extract("qwen3_coder", text, [tool])
        return call.parsed_arguments()["x"]

    assert await value({"type": "string"}) == "12"
    assert await value({"type": "integer"}) == 12
    assert await value({"anyOf": [{"type": "string"}, {"type": "null"}]}) == "12"
    assert await value({}) == 12
    _, [call] = await extract("qwen3_coder", text)
    assert call.parsed_arguments() == {"x": 12}


MALFORMED = {
    "qwen3_coder": "<tool_call><function=f><parameter=x>1</function></tool_call>",
    "seed": "<seed:tool_call>f()</seed:tool_call>",
    "glm": "<tool_call>f<arg_key>x</arg_key>1</tool_call>",
    "minimax": '<minimax:tool_call><invoke name="f">x = 1</invoke></minimax:tool_call>',
    "deepseek": "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{x}<｜tool▁call▁end｜>",
    "deepseek_v4": "<｜DSML｜tool_calls>f</｜DSML｜tool_calls>",
    "kimi": "<|tool_call_begin|>functions.f:0{}<|tool_call_end|>",
    "gemma": "<start_function_call>call:f{x:y}<end_function_call>",
    "gemma4": "<|tool_call>f(x=1)<tool_call|>",
    "mistral": "[TOOL_CALLS]f[ARGS]{x}",
    "llama3_json": '{"name": "f", "parameters": {"x": }}',
    "pythonic": "[f(x=open('/etc/passwd').read())]",
    "code": "```python\nprint(1)",
    "gpt-oss": " to=functions.f<|channel|>commentary<|message|>x<|call|>",
}


@pytest.mark.parametrize("name", MALFORMED)
async def test_every_format_reports_what_it_cannot_read(name):
    _, calls = await extract(name, MALFORMED[name], TOOLS)
    assert len(calls) == 1
    with pytest.raises(ValueError, match="Invalid JSON in arguments for"):
        calls[0].parsed_arguments()


def parse(name, text):
    parser = tool_parsers[name](byte_tokenizer())
    assert isinstance(parser, TextToolParser)
    return parser.parse(text, {"f": {"x": {}}})


PIECES = {
    "hermes": ["<tool_call>", "<tool_call>{", '<tool_call>{"name" </tool_call>'],
    "qwen3_coder": ["<function=", "<tool_call><function=f><parameter=x>1</parameter>"],
    "glm": ["<tool_call>f<arg_key>", "<arg_key>x</arg_key><arg_value>1</arg_value>"],
    "minimax": ['<minimax:tool_call><invoke name="f"><parameter name="x">'],
    "deepseek": ["<｜tool▁call▁begin｜>", "<｜tool▁sep｜>```json"],
    "kimi": ["<|tool_call_begin|>:"],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS][{", "[TOOL_CALLS]f[ARGS]{"],
    "gemma4": ["<|tool_call>call:f{,  ", "a,", '{<|"|>'],
    "llama3_json": ['{"name": ', '{"name": "f", "parameters": {}};', '{"name": ['],
    "pythonic": ["[f(", "[f(-", "-", "f(x=1),"],
    "code": ["```python\n", "```"],
    "gpt-oss": ["<|start|>", "to=f<|channel|><|message|>", "<|start|> to=f <|message|>"],
}


@pytest.mark.parametrize(
    ("name", "piece"), [(name, piece) for name, pieces in PIECES.items() for piece in pieces]
)
def test_hostile_text_takes_linear_time(name, piece):
    def seconds(num_characters):
        text = {"glm": "<tool_call>f", "gemma4": "<|tool_call>", "pythonic": "["}.get(name, "")
        text += piece * (num_characters // len(piece))
        start = time.thread_time()
        _, calls = parse(name, text)
        assert len(calls) <= MAX_CALLS
        return time.thread_time() - start

    short = min(seconds(50_000) for _ in range(3))
    assert min(seconds(400_000) for _ in range(2)) < 8 * max(short, 1e-3) * 4


async def test_calls_nested_too_deep_are_reported():
    for name, text in (
        ("llama3_json", '{"name": "f", "parameters": {"x": ' + "[" * 100_000),
        ("pythonic", "[f(x=" + "[" * 50_000 + ")]"),
        ("pythonic", "[f(x=" + "-" * 50_000 + "1)]"),
        ("llama3_json", '{"name": "f", "parameters": {"x": "\\ud800"}}'),
        ("pythonic", "[f(x='\\ud800')]"),
    ):
        _, [call] = parse(name, text)
        assert call.name == "f"
        assert not call.is_valid


def test_turns_end_where_the_format_says():
    tokenizer = byte_tokenizer()
    assert ToolParser.get_tool_parser("gpt-oss", tokenizer).stop_token_ids == []
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|call|>", "<|return|>"]})
    ids = tokenizer.convert_tokens_to_ids(["<|call|>", "<|return|>"])
    assert ToolParser.get_tool_parser("gpt-oss", tokenizer).stop_token_ids == ids
    assert KimiToolParser(tokenizer).stop_token_ids == []


# ---- the templates of models, where they are -----------------------------------------------------

TEMPLATES = Path("build/trl/trl/chat_templates")
FORMAT_OF = [
    (r"qwen(2_5|3)(_vl|_instruct.*)?(_training)?$", "hermes"),
    (r"qwen3_\d", "qwen3_coder"),
    (r"nemotron", "qwen3_coder"),
    (r"glm", "glm"),
    (r"deepseek", "deepseek"),
    (r"(diffusion_)?gemma(4|_)", "gemma4"),
    (r"llama3_", "llama3_json"),
    (r"lfm2", "pythonic"),
    (r"gptoss", "gpt-oss"),
]


def templates():
    for file in sorted(TEMPLATES.glob("*.jinja")):
        if "tool_call" in file.read_text():
            for pattern, name in FORMAT_OF:
                if re.match(pattern, file.stem):
                    yield pytest.param(file, name, id=file.stem)
                    break


@pytest.mark.parametrize(("file", "name"), list(templates()))
async def test_what_a_models_template_renders_is_read_back(file, name):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = file.read_text()
    is_text = "+ tool['function']['arguments'] +" in tokenizer.chat_template
    arguments = JSON if is_text else ARGUMENTS
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    user = {"role": "user", "content": "How is it?"}
    content = None if name == "deepseek" else ""
    turn = {"role": "assistant", "content": content, "tool_calls": [call]}
    prompt, whole = (
        tokenizer.apply_chat_template(
            messages, tools=TOOLS, add_generation_prompt=is_open, tokenize=False
        )
        for messages, is_open in (([user], True), ([user, turn], False))
    )
    marks = tool_parsers[name].marks
    rest = whole[len(prompt) :] if whole.startswith(prompt) else whole[whole.rindex("How is it?") :]
    _, calls = await extract(name, rest, TOOLS, marks)
    assert [(one.name, one.parsed_arguments()) for one in calls] == [("weather", ARGUMENTS)]


async def test_text_and_calls_are_told_apart():
    text, calls = await extract("hermes", f"Look: {CALL}{CALL} done<|im_end|>")
    assert text == "Look:  done"
    assert calls == [FunctionCall(name="f", arguments='{"x": [1, "é"]}')] * 2
    assert calls[0].parsed_arguments() == {"x": [1, "é"]}


@pytest.mark.parametrize(
    ("block", "name", "complaint"),
    [
        ('{"name": "f", "arguments": {"x": 1}', "f", "Invalid JSON in arguments for 'f': EOF"),
        ('{"name": "f"}', "f", "Invalid JSON in arguments for 'f': EOF"),
        ('{"name": "f", "arguments": [1]}', "f", "for 'f': expected an object, found a list"),
        ("call f", "", "Invalid JSON in arguments for '': expected"),
        ('{"name": "f", "arguments": {"x": NaN}}', "f", "Invalid JSON"),
    ],
)
@pytest.mark.parametrize("end", ["</tool_call>", ""], ids=["closed", "open"])
async def test_malformed_calls_are_reported_to_the_model(block, name, complaint, end):
    _, calls = await extract("hermes", f"<tool_call>{block}{end}")
    assert [call.name for call in calls] == [name]
    with pytest.raises(ValueError, match=complaint):
        calls[0].parsed_arguments()


async def test_calls_beyond_the_limit_stay_text():
    text, calls = await extract("hermes", CALL * (MAX_CALLS + 2))
    assert len(calls) == MAX_CALLS
    assert text == CALL * 2


async def test_a_parser_of_a_user_may_know_nothing_of_tools():
    @ToolParser.register("shouted")
    class Shouted(ToolParser):
        async def extract_tool_calls(self, responses_ids):
            return "", [FunctionCall(name=self.tokenizer.decode(responses_ids), arguments="{}")]

    _, calls = await extract("shouted", "F", tools=[])
    assert calls == [FunctionCall(name="F", arguments="{}")]


def test_an_unknown_format_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'hermess'. Did you mean 'hermes'\? Known: .*hermes"):
        ToolParser.get_tool_parser("hermess", byte_tokenizer())

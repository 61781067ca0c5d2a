"""Calls of every format reach the official client, as a whole and in events."""

import json
from contextlib import contextmanager

import pytest
from tokenizers import AddedToken

from tests.server.engines import MODEL, TOKEN, ScriptedRollout, byte_tokenizer
from tests.tools.test_parsers import ARGUMENTS, TOOLS, WRITTEN
from verl.server import ServerOptions, serve
from verl.tools.parsers import FunctionCall, ToolParser, tool_parsers

WHOLE_TURNS = ("llama3_json", "pythonic", "gpt-oss")
"""Formats in which nothing is certain before the turn has ended."""

ASKED = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "tools": TOOLS}


@contextmanager
def client_of_a_model_that_says(openai, text, name, *, marks=()):
    tokenizer = byte_tokenizer()
    special = [AddedToken(word, special=True) for word in marks]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    ids = tokenizer.encode(f"{text}<|im_end|>", add_special_tokens=False)
    options = ServerOptions(model=MODEL, max_model_len=4096, token=TOKEN, tool_call_parser=name)
    engine = ScriptedRollout(lambda request: ids, per_delta=3)
    with (
        serve([engine], tokenizer, options) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key=TOKEN, max_retries=0) as client,
    ):
        yield client, engine


def streamed(client, **fields):
    """Text, calls and the reason of the end of a stream; and how many events had text."""
    texts, calls, reason = [], [], None
    for event in client.chat.completions.create(**ASKED, **fields, stream=True):
        (choice,) = event.choices
        texts += [choice.delta.content] if choice.delta.content else []
        calls += choice.delta.tool_calls or []
        reason = choice.finish_reason or reason
    return texts, calls, reason


@pytest.mark.parametrize("case", WRITTEN)
def test_calls_reach_the_client_in_every_format(openai, case):
    name = case.split()[0]
    words = "" if name in WHOLE_TURNS else "Let me look it up."
    marks = tool_parsers[name].marks
    written = words + WRITTEN[case]
    with client_of_a_model_that_says(openai, written, name, marks=marks) as (client, engine):
        whole = client.chat.completions.create(**ASKED).choices[0]
        texts, calls, reason = streamed(client)
    for call in (*whole.message.tool_calls, *calls):
        assert call.function.name == "weather"
        assert json.loads(call.function.arguments) == ARGUMENTS
    assert len(whole.message.tool_calls) == len(calls) == 1
    assert (whole.message.content or "").strip() == "".join(texts).strip() == words
    assert whole.finish_reason == reason == "tool_calls"
    assert name in WHOLE_TURNS or len(texts) > 3, "text comes before the calls are known"
    expected = ToolParser.get_tool_parser(name, byte_tokenizer()).stop_token_ids
    assert set(expected) <= set(engine.requests[0].params.stop_token_ids)


@pytest.mark.parametrize("name", ["hermes", "mistral", "llama3_json", "kimi"])
def test_a_tool_that_was_not_offered_is_text(openai, name):
    written = WRITTEN[name].replace("weather", "shell")
    marks = tool_parsers[name].marks
    with client_of_a_model_that_says(openai, written, name, marks=marks) as (client, _):
        whole = client.chat.completions.create(**ASKED).choices[0]
        texts, calls, reason = streamed(client)
    assert whole.message.tool_calls is None
    assert calls == []
    assert whole.message.content == "".join(texts) == written
    assert whole.finish_reason == reason == "stop"


def test_a_stop_text_is_no_part_of_a_turn_with_a_call(openai):
    written = WRITTEN["mistral as list"].replace("[TOOL_CALLS]", "Yes.[TOOL_CALLS]") + "STOP"
    with client_of_a_model_that_says(openai, "Yes STOP", "mistral") as (client, _):
        texts, calls, _ = streamed(client, stop="STOP")
    assert ("".join(texts), calls) == ("Yes ", [])
    with client_of_a_model_that_says(openai, written, "hermes") as (client, _):
        texts, _, _ = streamed(client, stop="STOP")
    assert "".join(texts) == written.removesuffix("STOP")


def test_a_parser_of_a_user_serves_too(openai, monkeypatch):
    class AtSignParser(ToolParser):
        async def extract_tool_calls(self, responses_ids, tools=None):
            text, _, call = self.decode(list(responses_ids)).partition("@")
            name, _, words = call.partition(" ")
            return text, [FunctionCall(name=name, arguments=words)] if call else []

    monkeypatch.setitem(tool_parsers._entries, "at_sign", AtSignParser)
    with client_of_a_model_that_says(openai, 'So: @run {"code": "1"}', "at_sign") as (client, _):
        texts, calls, _ = streamed(client)
    assert "".join(texts) == "So: "
    assert [(call.function.name, call.function.arguments) for call in calls] == [
        ("run", '{"code": "1"}')
    ]


def test_an_unknown_format_is_refused_with_the_known_ones():
    options = ServerOptions(model=MODEL, max_model_len=64, tool_call_parser="xml")
    with pytest.raises(ValueError, match=r"unknown tool-call format.*'xml'.*hermes"):
        serve([ScriptedRollout(lambda request: [])], byte_tokenizer(), options)

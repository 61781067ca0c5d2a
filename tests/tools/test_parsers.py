"""Tool calls, as models write them and as they should not."""

import pytest
from tokenizers import AddedToken

from tests.server.engines import byte_tokenizer
from verl.tools.parsers import MAX_CALLS, FunctionCall, ToolParser

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": [1, "é"]}}\n</tool_call>'


async def extract(name, text, tools=None, special=()):
    """The result of a format for a text whose `special` words are special tokens."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [AddedToken(word, special=True) for word in special]}
    )
    parser = ToolParser.get_tool_parser(name, tokenizer)
    return await parser.extract_tool_calls(tokenizer.encode(text), tools)


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

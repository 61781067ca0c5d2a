"""Text from tokens: whole characters, nothing of a stop text, tool calls as calls."""

from hypothesis import given
from hypothesis import strategies as st

from tests.server.engines import byte_tokenizer
from verl.server.chat import BlockCallReader
from verl.server.samples import Detokenizer, StopCutter
from verl.tools.parsers import FunctionCall, HermesToolParser

TOKENIZER = byte_tokenizer()


def decode(ids: list[int]) -> str:
    return TOKENIZER.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def encode(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


@given(st.text(max_size=40) | st.text("é😀\x80", max_size=40), st.integers(1, 5))
def test_pieces_of_text_add_up_to_the_text(text, per_piece):
    ids = encode(text)
    stream = Detokenizer(decode)
    pieces = [stream.add(ids[n : n + per_piece]) for n in range(0, len(ids), per_piece)]
    assert "".join(pieces) + stream.finish() == decode(ids)


def test_half_a_character_is_kept_until_it_is_whole():
    stream = Detokenizer(decode)
    first, *rest = encode("😀")
    assert stream.add([first]) == ""
    assert stream.add(rest[:2]) == ""
    assert stream.add(rest[2:]) == "😀"


def test_bytes_that_never_become_a_character_are_not_held_back_for_ever():
    stream = Detokenizer(decode)
    (first, *_) = encode("😀")
    pieces = [stream.add([first]) for _ in range(65)]
    assert pieces == [""] * 64 + ["\ufffd" * 65]


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_text_ends_before_the_first_stop_text_however_it_is_cut_up(text, stops):
    ends = [place for stop in stops if (place := text.find(stop)) >= 0]
    # One letter at a time, the stop text that is complete first ends the text.
    first = min((text.find(stop) + len(stop) for stop in stops if stop in text), default=None)
    cutter = StopCutter(stops)
    pieces = "".join(cutter.add(letter) for letter in text) + cutter.finish()
    if first is None:
        assert pieces == text
    else:
        seen = text[:first]
        assert pieces == seen[: min(seen.find(stop) for stop in stops if stop in seen)]
    whole = StopCutter(stops)
    assert whole.add(text) + whole.finish() == (text[: min(ends)] if ends else text)


def test_what_only_begins_like_a_stop_text_is_given_back():
    cutter = StopCutter(["END"])
    assert [cutter.add("a E"), cutter.add("N"), cutter.add("X")] == ["a ", "", "ENX"]
    assert cutter.add("EN") == ""
    assert cutter.finish() == "EN"


CALL = '<tool_call>\n{"name": "f", "arguments": {"x": [1, "é"]}}\n</tool_call>'


@given(st.integers(1, 20))
def test_calls_are_found_however_the_text_is_cut_up(size):
    text = f"before {CALL} between {CALL} after"
    reader = BlockCallReader(*HermesToolParser.formats, {"f": {}})
    found = [
        part for n in range(0, len(text), size) for part in reader.add_text(text[n : n + size])
    ]
    found.append(reader.finish())
    calls = [part for part in found if isinstance(part, FunctionCall)]
    assert calls == [FunctionCall(name="f", arguments='{"x": [1, "é"]}')] * 2
    assert "".join(part for part in found if isinstance(part, str)) == "before  between  after"


def test_a_block_that_is_no_call_stays_text():
    for block in (
        "<tool_call>not json</tool_call>",
        '<tool_call>{"name": "f"}</tool_call>',
        '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "text"}</tool_call>',
        f'<tool_call>{{"name": "f", "arguments": {{"x": {"[" * 100_000} }}}}</tool_call>',
    ):
        assert BlockCallReader(*HermesToolParser.formats, {"f": {}}).add_text(block) == [block]


def test_a_block_that_is_never_closed_stays_text():
    reader = BlockCallReader(*HermesToolParser.formats, {"f": {}})
    assert reader.add_text('a <tool_call>{"name"') == ["a "]
    assert reader.finish() == '<tool_call>{"name"'

"""A prompt becomes the ids that a model is given: templates, truncation, special words."""

import random
import time
import tracemalloc

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, processors

from examples.quickstart.build_model import ASSISTANT, END, USER, build_tokenizer
from tests.tiny_tokenizer import tiny_tokenizer
from verl.utils.dataset import prompts
from verl.utils.dataset.prompts import (
    PromptTooLong,
    as_prompt,
    encode_prompt,
    prompt_text,
    set_chat_template,
    shield,
    truncate,
)
from verl.utils.dataset.tables import BadRow, JsonFile

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'][0] }}:{{ message['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


def chat_tokenizer():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def text(tokenizer, ids):
    return "".join(tokenizer.convert_ids_to_tokens(ids))


def test_messages_go_through_the_chat_template_with_one_beginning_of_text():
    tokenizer = chat_tokenizer()
    prompt = as_prompt([{"role": "user", "content": "1+1="}], tokenizer)
    assert text(tokenizer, encode_prompt(prompt, tokenizer)) == "<s>u:1+1=a:"


def test_a_plain_text_is_a_users_message_where_there_is_a_chat_template():
    tokenizer = chat_tokenizer()
    assert as_prompt("1+1=", tokenizer) == [{"role": "user", "content": "1+1="}]


def test_a_plain_text_is_sent_as_it_is_where_there_is_none():
    tokenizer = tiny_tokenizer()
    assert as_prompt("1+1=", tokenizer) == "1+1="
    assert text(tokenizer, encode_prompt("1+1=", tokenizer)) == "1+1="


def test_a_text_begins_once_whoever_writes_the_beginning():
    tokenizer = chat_tokenizer()
    begin = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.backend_tokenizer.post_processor = begin
    assert text(tokenizer, tokenizer("1+1=").input_ids) == "<s>1+1=", "this tokenizer adds one"
    messages = [{"role": "user", "content": "1"}]
    assert text(tokenizer, encode_prompt(messages, tokenizer)) == "<s>u:1a:"
    assert text(tokenizer, encode_prompt("<s>u:1a:", tokenizer)) == "<s>u:1a:"
    tokenizer.chat_template = None
    assert text(tokenizer, encode_prompt("1+1=", tokenizer)) == "<s>1+1="


def test_a_text_with_special_tokens_has_been_through_a_template_already():
    tokenizer = chat_tokenizer()
    templated = "<s>u:1+1=a:"
    assert as_prompt(templated, tokenizer) == templated
    assert text(tokenizer, encode_prompt(templated, tokenizer)) == templated


def test_messages_without_a_chat_template_are_refused_with_the_way_out():
    with pytest.raises(ValueError, match=r"no chat template; set data\.chat_template=chatml"):
        encode_prompt([{"role": "user", "content": "x"}], tiny_tokenizer())


def test_a_template_can_be_named_or_written_out():
    tokenizer = tiny_tokenizer()
    set_chat_template(tokenizer, "chatml")
    messages = [{"role": "user", "content": "hi"}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    set_chat_template(tokenizer, None)
    assert tokenizer.chat_template is not None, "None keeps the tokenizer's own"
    set_chat_template(tokenizer, "{{ messages[0]['content'] }}")
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "hi"


def test_template_options_reach_the_template():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}{% if thinking %}!{% endif %}"
    prompt = [{"role": "user", "content": "hm"}]
    plain = encode_prompt(prompt, tokenizer)
    thinking = encode_prompt(prompt, tokenizer, template_kwargs={"thinking": True})
    assert (text(tokenizer, plain), text(tokenizer, thinking)) == ("hm", "hm!")


@pytest.mark.parametrize(
    ("side", "kept"), [("left", [4, 5, 6]), ("right", [1, 2, 3]), ("middle", [1, 5, 6])]
)
def test_truncation_cuts_the_side_it_names(side, kept):
    assert truncate([1, 2, 3, 4, 5, 6], 3, side) == kept
    assert truncate([1, 2, 3], 3, side) == [1, 2, 3]


def test_truncation_error_names_the_limit_and_the_ways_out():
    with pytest.raises(PromptTooLong, match=r"4 tokens; data\.max_prompt_length allows 3.*truncat"):
        truncate([1, 2, 3, 4], 3, "error")


@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_a_huge_prompt_is_cut_before_it_is_tokenized(side):
    tokenizer = tiny_tokenizer()
    huge = "a" * 10**6 + "b" * 10**6
    start = time.thread_time()
    ids = encode_prompt(huge, tokenizer, max_tokens=8, truncation=side)
    assert time.thread_time() - start < 1.0
    expected = {"left": "b" * 8, "right": "a" * 8, "middle": "a" * 4 + "b" * 4}
    assert text(tokenizer, ids) == expected[side]
    with pytest.raises(PromptTooLong, match="2000000 characters"):
        encode_prompt(huge, tokenizer, max_tokens=8)


TOKENIZER = build_tokenizer()
SPECIAL = sorted(TOKENIZER.all_special_tokens)
words = st.lists(
    st.one_of(st.text(st.characters(exclude_categories=["Cs"])), st.sampled_from(SPECIAL))
).map("".join)


@settings(max_examples=300, deadline=None)
@given(content=words)
@example(content="a\x00b\u202ec\u200bd\U0001f600\ufeff")
@example(content="\ue000 0\ue000" + END)
@example(content=END * 3 + USER)
def test_any_text_comes_back_from_its_tokens_and_controls_nothing(content):
    ids = encode_prompt([{"role": "user", "content": content}], TOKENIZER)
    assert TOKENIZER.decode(ids) == f"{USER}{content}{ASSISTANT}"
    control = [token for token in ids if token in TOKENIZER.all_special_ids]
    assert control == TOKENIZER.convert_tokens_to_ids([USER, ASSISTANT])


def test_text_without_special_tokens_has_the_tokens_it_always_had():
    messages = [{"role": "user", "content": "1+1"}]
    text = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert encode_prompt(messages, TOKENIZER) == TOKENIZER(text).input_ids


@pytest.mark.parametrize("content", ["^" * 10**6, "a" * 10**6, END * 250_000, "\U0001f600" * 10**6])
def test_a_million_characters_are_refused_in_little_time_and_memory(content):
    messages = [{"role": "user", "content": content}]
    with pytest.raises(PromptTooLong):  # once before the clock: the tokenizer warms up
        encode_prompt(messages, TOKENIZER, max_tokens=512)
    tracemalloc.start()
    start = time.thread_time()
    with pytest.raises(PromptTooLong, match="characters"):
        encode_prompt(messages, TOKENIZER, max_tokens=512)
    seconds = time.thread_time() - start
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seconds < 1.0  # an idle machine needs a twentieth of this
    assert peak < 50 << 20


def test_a_hundred_thousand_lines_of_any_bytes_are_rows_or_named_as_bad(tmp_path):
    chance = random.Random(0)
    prompts = [
        b'{"prompt": "' + chance.randbytes(chance.randint(0, 12)).replace(b"\n", b"?") + b'"}'
        for _ in range(100_000)
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(prompts))
    file = JsonFile(str(tmp_path / "a.jsonl"))
    assert len(file) == 100_000
    texts = [row["prompt"] for row in file if not isinstance(row, BadRow)]
    assert 5_000 < len(texts) < 95_000
    for text in texts[:2000]:
        ids = encode_prompt([{"role": "user", "content": text}], TOKENIZER)
        assert TOKENIZER.decode(ids) == f"{USER}{text}{ASSISTANT}"


def test_tokens_that_are_marked_special_but_not_named_are_words_too():
    tokenizer = build_tokenizer()
    tokenizer.add_tokens([AddedToken("<|turn|>", special=True)])
    assert "<|turn|>" not in tokenizer.all_special_tokens
    messages, marks = shield([{"role": "user", "content": "a<|turn|>b"}], tokenizer)
    assert "<|turn|>" not in messages[0]["content"]
    ids = marks.encode(messages[0]["content"], tokenizer)
    assert tokenizer.convert_tokens_to_ids("<|turn|>") not in ids


TEMPLATE_REPEATED_PROMPTS = (
    "{% for message in messages %}{{ message['content'] }}{{ mood }}{% endfor %}"
)


@pytest.fixture
def tokenizer():
    made = tiny_tokenizer()
    made.chat_template = TEMPLATE_REPEATED_PROMPTS
    return made


@pytest.fixture
def counted(monkeypatch):
    """The prompts that were worked out."""
    asked = []

    def noting(prompt, *args, **kwargs):
        asked.append(prompt)
        return prompt_text(prompt, *args, **kwargs)

    monkeypatch.setattr(prompts, "prompt_text", noting)
    return asked


def says(text):
    return [{"role": "user", "content": text}]


def test_samples_of_a_prompt_share_its_ids_but_not_the_list(tokenizer, counted):
    first = encode_prompt(says("ab"), tokenizer)
    kept = list(first)
    first.append(99)
    second = encode_prompt(says("ab"), tokenizer)
    second.append(98)
    assert encode_prompt(says("ab"), tokenizer) == kept
    assert len(counted) == 1


def test_whatever_may_change_the_ids_is_part_of_the_question(tokenizer, counted):
    questions = [
        (says("ab"), {}),
        (says("abc"), {}),
        ("ab", {}),
        (says("ab"), {"template_kwargs": {"mood": "x"}}),
        (says("ab"), {"tools": [{"name": "f"}]}),
        (says("ab"), {"max_tokens": 1, "truncation": "left"}),
        (says("ab"), {"max_tokens": 1, "truncation": "right"}),
    ]
    found = [encode_prompt(prompt, tokenizer, **options) for prompt, options in questions]
    assert found == [encode_prompt(prompt, tokenizer, **options) for prompt, options in questions]
    assert len(counted) == len(questions)
    tokenizer.chat_template = TEMPLATE_REPEATED_PROMPTS + "!"
    assert encode_prompt(says("ab"), tokenizer) != found[0]
    before = encode_prompt(says("<new>"), tokenizer)
    tokenizer.add_tokens(["<new>"])
    assert len(encode_prompt(says("<new>"), tokenizer)) < len(before)


@pytest.mark.parametrize("mood", [object(), {1: "x"}])
def test_what_cannot_be_written_down_is_worked_out_every_time(tokenizer, counted, mood):
    odd = {"template_kwargs": {"mood": mood}}
    for _ in range(2):
        assert encode_prompt(says("ab"), tokenizer, **odd)
    assert len(counted) == 2


def test_a_refusal_is_not_remembered_as_an_answer(tokenizer):
    for _ in range(2):
        with pytest.raises(PromptTooLong, match="allows 1 tokens"):
            encode_prompt(says("abcdef"), tokenizer, max_tokens=1)

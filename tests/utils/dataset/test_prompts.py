import time

import pytest
from tokenizers import processors

from tests.tiny_tokenizer import tiny_tokenizer
from verl.utils.dataset.prompts import (
    PromptTooLong,
    as_prompt,
    encode_prompt,
    set_chat_template,
    truncate,
)

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
    start = time.perf_counter()
    ids = encode_prompt(huge, tokenizer, max_tokens=8, truncation=side)
    assert time.perf_counter() - start < 1.0
    expected = {"left": "b" * 8, "right": "a" * 8, "middle": "a" * 4 + "b" * 4}
    assert text(tokenizer, ids) == expected[side]
    with pytest.raises(PromptTooLong, match="2000000 characters"):
        encode_prompt(huge, tokenizer, max_tokens=8)

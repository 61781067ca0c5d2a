"""The same question gets the same ids, and only another question is worked out."""

import pytest

from tests.tiny_tokenizer import tiny_tokenizer
from verl.utils.dataset import repeated_prompts
from verl.utils.dataset.prompts import PromptTooLong, encode_prompt, encode_prompt_once

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{{ mood }}{% endfor %}"


@pytest.fixture
def tokenizer():
    made = tiny_tokenizer()
    made.chat_template = TEMPLATE
    return made


@pytest.fixture
def counted(monkeypatch):
    """What `encode_prompt` was asked for."""
    asked = []

    def noting(prompt, *args, **kwargs):
        asked.append(prompt)
        return encode_prompt(prompt, *args, **kwargs)

    monkeypatch.setattr(repeated_prompts, "encode_prompt", noting)
    return asked


def says(text):
    return [{"role": "user", "content": text}]


def test_samples_of_a_prompt_share_its_ids_but_not_the_list(tokenizer, counted):
    first = encode_prompt_once(says("ab"), tokenizer)
    first.append(99)
    assert encode_prompt_once(says("ab"), tokenizer) == encode_prompt(says("ab"), tokenizer)
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
    found = [encode_prompt_once(prompt, tokenizer, **options) for prompt, options in questions]
    assert found == [encode_prompt(prompt, tokenizer, **options) for prompt, options in questions]
    assert len(counted) == len(questions)
    tokenizer.chat_template = TEMPLATE + "!"
    assert encode_prompt_once(says("ab"), tokenizer) == encode_prompt(says("ab"), tokenizer)
    assert encode_prompt_once(says("ab"), tokenizer) != found[0]


@pytest.mark.parametrize("mood", [object(), {1: "x"}])
def test_what_cannot_be_written_down_is_worked_out_every_time(tokenizer, counted, mood):
    odd = {"template_kwargs": {"mood": mood}}
    for _ in range(2):
        assert encode_prompt_once(says("ab"), tokenizer, **odd)
    assert len(counted) == 2


def test_a_refusal_is_not_remembered_as_an_answer(tokenizer):
    for _ in range(2):
        with pytest.raises(PromptTooLong, match="allows 1 tokens"):
            encode_prompt_once(says("abcdef"), tokenizer, max_tokens=1)

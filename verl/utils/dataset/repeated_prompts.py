"""Token ids of a prompt that is asked for again and again, as the samples of a group do.

A template and a tokenizer take a quarter of a millisecond for a usual prompt; at a thousand samples
that is a noticeable part of a step, in which no engine has anything to do yet.
"""

import json
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from verl.utils.dataset.prompts import Prompt, encode_prompt

MAX_REMEMBERED = 64
"""Samples of one prompt follow each other, so a few are enough."""


def encode_prompt_once(
    prompt: Prompt, tokenizer: PreTrainedTokenizerBase, **options: Any
) -> list[int]:
    """`encode_prompt`, whose answer for the same question is remembered for a while."""
    question = [prompt, options]
    try:
        text = json.dumps(question)
    except (TypeError, ValueError):  # such as objects of a template's own
        return encode_prompt(prompt, tokenizer, **options)
    if json.loads(text) != question:  # such as keys that are numbers
        return encode_prompt(prompt, tokenizer, **options)
    return list(_encoded(text, tokenizer, str(tokenizer.chat_template)))


@lru_cache(maxsize=MAX_REMEMBERED)
def _encoded(
    question: str,
    tokenizer: PreTrainedTokenizerBase,
    template: str,  # a tokenizer may get another one
) -> tuple[int, ...]:
    prompt, options = json.loads(question)
    return tuple(encode_prompt(prompt, tokenizer, **options))

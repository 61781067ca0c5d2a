"""Token ids of a prompt that is asked for again and again, as the samples of a group do.

A template and a tokenizer take a quarter of a millisecond for a usual prompt; at a thousand samples
that is a noticeable part of a step, in which no engine has anything to do yet.
"""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from verl.utils.dataset.prompts import Prompt, encode_prompt

MAX_REMEMBERED = 64
"""Samples of one prompt follow each other, so a few are enough."""


def encode_prompt_once(
    prompt: Prompt,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_tokens: int | None = None,
    truncation: str = "error",
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """`encode_prompt`, whose answer for the same question is remembered for a while."""
    try:
        question = json.dumps([prompt, tools, template_kwargs])
    except (TypeError, ValueError):  # such as objects of a template's own
        return encode_prompt(
            prompt, tokenizer, max_tokens=max_tokens, truncation=truncation,
            tools=tools, template_kwargs=template_kwargs,
        )  # fmt: skip
    template = getattr(tokenizer, "chat_template", None)
    return list(_encoded(question, tokenizer, str(template), max_tokens, truncation))


@lru_cache(maxsize=MAX_REMEMBERED)
def _encoded(
    question: str,
    tokenizer: PreTrainedTokenizerBase,
    template: str,  # a tokenizer may get another one
    max_tokens: int | None,
    truncation: str,
) -> tuple[int, ...]:
    prompt, tools, template_kwargs = json.loads(question)
    return tuple(
        encode_prompt(
            prompt, tokenizer, max_tokens=max_tokens, truncation=truncation,
            tools=tools, template_kwargs=template_kwargs,
        )
    )  # fmt: skip

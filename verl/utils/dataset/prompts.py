"""From a prompt in a dataset to the token ids that a model is given.

A prompt is a list of chat messages, which the chat template turns into text, or a text. A text
that holds special tokens of the tokenizer has been through a template already and is taken as it
is. Any other text is one message of a user where there is a chat template, and plain text where
there is none. Whoever measures and whoever sends uses `encode_prompt`: both see the same ids.

What people write in a message is text and nothing else: `<|im_end|>` inside it does not end the
turn, it becomes the tokens of these ten characters (`special_text`).
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from verl.utils.dataset.prompts import NOTHING_SHIELDED, Shield, shield, special_texts

Message = Mapping[str, Any]
Prompt = str | list[dict[str, Any]]

TRUNCATIONS = ("error", "left", "right", "middle")

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CHAT_TEMPLATES = {"chatml": CHATML}


class PromptTooLong(ValueError):
    """A prompt that is longer than allowed, with `truncation=error`."""


def as_prompt(value: str | Sequence[Message], tokenizer: PreTrainedTokenizerBase) -> Prompt:
    """What the value of a prompt column stands for: messages, or text that is sent as it is."""
    if not isinstance(value, str):
        return [without_nulls(message) for message in value]
    if tokenizer.chat_template is None or holds_special_tokens(value, tokenizer):
        return value
    return [{"role": "user", "content": value}]


def holds_special_tokens(text: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    return any(token in text for token in special_texts(tokenizer))


def without_nulls(message: Message) -> dict[str, Any]:
    """A table gives every message all fields that any message has; templates ask which are set."""
    return {
        name: value
        for name, value in message.items()
        if value is not None or name in ("role", "content")
    }


def prompt_text(
    prompt: Prompt,
    tokenizer: PreTrainedTokenizerBase,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """The text of a prompt, ready for the model to continue."""
    if isinstance(prompt, str):
        return prompt
    return render(
        prompt, tokenizer, add_generation_prompt=True, tools=tools, template_kwargs=template_kwargs
    )


def render(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    *,
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """Messages as the chat template writes them."""
    if tokenizer.chat_template is None:
        raise ValueError(
            f"the prompt is a list of messages, but the tokenizer {tokenizer.name_or_path!r} has "
            "no chat template; set data.chat_template=chatml (or a Jinja template), or write "
            "prompts as text"
        )
    text = tokenizer.apply_chat_template(
        [dict(message) for message in messages],
        tools=None if not tools else [dict(tool) for tool in tools],
        add_generation_prompt=add_generation_prompt,
        tokenize=False,
        **(template_kwargs or {}),
    )
    assert isinstance(text, str)
    return text


def encode_prompt(
    prompt: Prompt,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_tokens: int | None = None,
    truncation: str = "error",
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of a prompt, at most `max_tokens` of them; `truncation` names what is cut away.

    A text far beyond the limit is cut (or refused) before it is tokenized, because tokenizers may
    need much more time and memory for it than its length suggests.
    """
    marks: Shield = NOTHING_SHIELDED
    if not isinstance(prompt, str):
        prompt, marks = shield(prompt, tokenizer)
    text = prompt_text(prompt, tokenizer, tools=tools, template_kwargs=template_kwargs)
    if max_tokens is not None:
        text = _within_reach(text, max_tokens * longest_token(tokenizer), max_tokens, truncation)
    # A template writes the special tokens itself; plain text still needs those that begin a text.
    is_plain = isinstance(prompt, str) and not holds_special_tokens(prompt, tokenizer)
    ids = marks.encode(text, tokenizer, add_special_tokens=is_plain)
    return ids if max_tokens is None else truncate(ids, max_tokens, truncation)


def truncate(ids: list[int], max_tokens: int, truncation: str) -> list[int]:
    """Cut ids to `max_tokens`: on the left, on the right, or out of the middle."""
    if len(ids) <= max_tokens:
        return ids
    if truncation == "left":
        return ids[-max_tokens:]
    if truncation == "right":
        return ids[:max_tokens]
    if truncation == "middle":
        head = max_tokens // 2
        return ids[:head] + ids[len(ids) - (max_tokens - head) :]
    raise PromptTooLong(_too_long(f"{len(ids)} tokens", max_tokens))


def _within_reach(text: str, max_characters: int, max_tokens: int, truncation: str) -> str:
    """Cut away text that cannot be among the tokens that are kept: no token is longer than that."""
    if len(text) <= 2 * max_characters + 1:
        return text
    if truncation == "left":
        return text[-max_characters:]
    if truncation == "right":
        return text[:max_characters]
    if truncation == "middle":
        return text[:max_characters] + text[-max_characters:]
    raise PromptTooLong(_too_long(f"{len(text)} characters", max_tokens))


def _too_long(length: str, max_tokens: int) -> str:
    return (
        f"the prompt has {length}; data.max_prompt_length allows {max_tokens} tokens. Raise it, "
        "set data.filter_overlong_prompts=True to leave such prompts out, or data.truncation to "
        "left, right or middle to cut them"
    )


@lru_cache(maxsize=4)
def longest_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Characters of the longest token: a text of n characters has at least n / this many tokens.

    Never below 64, for small vocabularies have one token for all the words they do not know.
    """
    return max(64, *map(len, tokenizer.get_vocab()))


def set_chat_template(tokenizer: PreTrainedTokenizerBase, template: str | None) -> None:
    """Let the tokenizer use a template by name, or Jinja text; None keeps its own."""
    if template is not None:
        tokenizer.chat_template = CHAT_TEMPLATES.get(template, template)

"""From a prompt in a dataset to the token ids that a model is given.

A prompt is a list of chat messages, which the chat template turns into text, or a text. A text
that holds special tokens of the tokenizer has been through a template already and is taken as it
is. Any other text is one user message where there is a chat template, and plain text where there
is none. Measuring and sending both use `encode_prompt`, so they see the same ids.

Special tokens inside a message are words: a user who writes `<|im_end|>` must not end the turn and
go on as somebody else. Before the template sees a message, such words are replaced by characters of
private use; after it, each is tokenized as the plain text it stands for (`shield`). Decoding gives
the message back.
"""

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from verl.utils.dataset.tables import DataError

Message = Mapping[str, Any]
Prompt = str | list[dict[str, Any]]
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


CHAT_TEMPLATES = {"chatml": CHATML}

MAX_REMEMBERED = 1024
_remembered: dict[tuple[Any, ...] | None, tuple[int, ...]] = {}
_remembering = threading.Lock()


class NoChatTemplate(ValueError):
    """Messages, and a tokenizer that cannot write them."""


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


PART_TYPES = ("image", "image_url", "video")


def media_parts(messages: Sequence[Message]) -> Iterator[Mapping[str, Any]]:
    """Parts of messages that are an image or a video, in order."""
    for message in messages:
        content = message.get("content")
        if isinstance(content, list | tuple):
            for part in content:
                if isinstance(part, Mapping) and part.get("type") in PART_TYPES:
                    yield part


def has_media(prompt: str | Sequence[Message]) -> bool:
    """Whether a message has a part that is an image or a video."""
    return not isinstance(prompt, str) and any(True for _ in media_parts(prompt))


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
        raise NoChatTemplate(
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
    need much more time and memory for it than its length suggests. What the last prompts gave is
    remembered: samples of one prompt follow each other.
    """
    options = {
        "max_tokens": max_tokens,
        "truncation": truncation,
        "tools": tools,
        "template_kwargs": template_kwargs,
    }
    key = _question(prompt, options, tokenizer)
    if key in _remembered:
        return list(_remembered[key])
    if has_media(prompt):
        raise DataError(
            "the prompt has images or videos, whose tokens only the model's processor can count; "
            "encode it with a MediaEncoder"
        )
    marks: Shield = NOTHING_SHIELDED
    if not isinstance(prompt, str):
        prompt, marks = shield(prompt, tokenizer)
    text = prompt_text(prompt, tokenizer, tools=tools, template_kwargs=template_kwargs)
    if max_tokens is not None:
        text = _within_reach(text, max_tokens * longest_token(tokenizer), max_tokens, truncation)
    # A template writes the special tokens itself; plain text still needs those that begin a text.
    is_plain = isinstance(prompt, str) and not holds_special_tokens(prompt, tokenizer)
    ids = marks.encode(text, tokenizer, add_special_tokens=is_plain)
    if max_tokens is not None:
        ids = truncate(ids, max_tokens, truncation)
    if key is not None:
        with _remembering:
            _remembered[key] = tuple(ids)
            if len(_remembered) > MAX_REMEMBERED:
                del _remembered[next(iter(_remembered))]
    return ids


def _question(
    prompt: Prompt, options: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase
) -> tuple[Any, ...] | None:
    """What decides the ids; None if JSON cannot tell two such questions apart."""
    question = [prompt, options]
    try:
        text = json.dumps(question)
    except (TypeError, ValueError):  # such as objects of a template's own
        return None
    if json.loads(text) != question:  # such as keys that are numbers
        return None
    # A tokenizer may get another template, and more tokens.
    return text, tokenizer, str(tokenizer.chat_template), len(tokenizer)


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


PRIVATE_USE = (*range(0xE000, 0xF900), *range(0xF0000, 0xF2000))


@dataclass(frozen=True)
class Shield:
    """Which mark stands for which text."""

    texts: Mapping[str, str] = field(default_factory=dict)

    def encode(
        self, text: str, tokenizer: PreTrainedTokenizerBase, *, add_special_tokens: bool = False
    ) -> list[int]:
        """Token ids of a text with marks."""
        if not self.texts:
            return list(tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])
        pieces = self.split(text)
        known = dict.fromkeys(pieces)
        marks = [piece for piece in known if piece in self.texts]
        plain = [piece for piece in known if piece not in self.texts]
        ids = dict(zip(plain, batch_ids(tokenizer, plain), strict=True))
        words = [self.texts[mark] for mark in marks]
        ids |= zip(marks, batch_ids(tokenizer, words, split_special_tokens=True), strict=True)
        return [token for piece in pieces for token in ids[piece]]

    def split(self, text: str) -> list[str]:
        """The text in pieces, each of which is one mark or holds none."""
        if not self.texts:
            return [text]
        pattern = "|".join(map(re.escape, self.texts))
        return [piece for piece in re.split(f"({pattern})", text) if piece]


def batch_ids(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], *, split_special_tokens: bool = False
) -> list[list[int]]:
    if not texts:
        return []
    encoded = tokenizer(texts, add_special_tokens=False, split_special_tokens=split_special_tokens)
    return encoded["input_ids"]  # pyright: ignore[reportReturnType]


NOTHING_SHIELDED = Shield()


def shield(
    messages: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase
) -> tuple[list[dict[str, Any]], Shield]:
    """Messages with marks in the place of special tokens, and what the marks mean."""
    special = special_texts(tokenizer)
    words = "\n".join(texts_in([words_of(message) for message in messages]))
    found = [token for token in special if token in words]
    if not found:
        return [dict(message) for message in messages], NOTHING_SHIELDED
    taken = set(words).union(*special)
    letters = (chr(code) for code in PRIVATE_USE if chr(code) not in taken)
    marks = dict(zip(found, letters, strict=False))
    if len(marks) < len(found):
        raise DataError("the messages hold special tokens and every character of private use")

    def hide(text: str) -> str:
        for token, mark in marks.items():  # longest first: one may be part of another
            text = text.replace(token, mark)
        return text

    shielded = [{**message, **replaced(words_of(message), hide)} for message in messages]
    return shielded, Shield({mark: token for token, mark in marks.items()})


def special_texts(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Every text that the tokenizer turns into one special token, the longest first.

    Many tokenizers mark tokens of their template as special without listing them by name.
    """
    return _special_texts(tokenizer, len(tokenizer))


@lru_cache(maxsize=16)
def _special_texts(tokenizer: PreTrainedTokenizerBase, num_tokens: int) -> tuple[str, ...]:
    del num_tokens  # a tokenizer that has been given more tokens is another one
    marked = {t.content for t in tokenizer.added_tokens_decoder.values() if t.special}
    named = map(str, tokenizer.all_special_tokens)
    return tuple(sorted(filter(None, marked.union(named)), key=lambda text: (-len(text), text)))


def words_of(message: Mapping[str, Any]) -> dict[str, Any]:
    """What somebody wrote: everything but the role, which belongs to the template."""
    return {name: value for name, value in message.items() if name != "role"}


def texts_in(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for inner in value.values() for text in texts_in(inner)]
    if isinstance(value, list | tuple):
        return [text for inner in value for text in texts_in(inner)]
    return []


def replaced(value: Any, hide: Callable[[str], str]) -> Any:
    """A copy of `value` with `hide` applied to every text inside."""
    if isinstance(value, str):
        return hide(value)
    if isinstance(value, Mapping):
        return {name: replaced(inner, hide) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [replaced(inner, hide) for inner in value]
    return value

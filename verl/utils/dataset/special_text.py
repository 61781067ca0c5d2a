r"""Special tokens that stand in the words of a message are words.

A chat template puts messages and control tokens into one text, and a tokenizer cannot tell whose
they are: a user who writes `<|im_end|>` would end his turn and could go on as somebody else. So
before the template sees a message, such words are replaced by marks, characters of private use that
nobody wrote; after it, each mark is tokenized as the plain text it stands for. Decoding gives the
message back.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from verl.utils.dataset.tables import DataError

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


NOTHING_SHIELDED = Shield()


def batch_ids(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], *, split_special_tokens: bool = False
) -> list[list[int]]:
    if not texts:
        return []
    encoded = tokenizer(texts, add_special_tokens=False, split_special_tokens=split_special_tokens)
    return encoded["input_ids"]  # pyright: ignore[reportReturnType]


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
